"""All errors, in one tree, by what the caller should do about them.

Every class has a ``code`` (what travels on the wire), an HTTP status and ``retryable``. The client raises the class that the server
named. Per-item outcomes of a batch are statuses (`umbp.types`), not errors.
"""

from __future__ import annotations


class UmbpError(Exception):
    """Root of the tree. ``field`` names the argument or option at fault, ``example`` shows a good value."""

    code = "internal"
    http_status = 500
    retryable = False

    def __init__(self, message: str, *, field: str = "", example: str = "") -> None:
        text = message
        if field and field not in message:
            text = f"{field}: {message}"
        if example:
            text = f"{text} (for example: {example})"
        super().__init__(text)
        self.field = field
        self.example = example


# -- fix the call ------------------------------------------------------------------------------------------------------------------


class InvalidRequest(UmbpError, ValueError):
    """The call itself is wrong: a bad value, a wrong shape, an unknown field. Nothing was changed."""

    code = "invalid_request"
    http_status = 400


class ConfigError(InvalidRequest):
    """An option of a process is wrong; it does not start."""

    code = "invalid_config"


class NotFound(UmbpError, LookupError):
    """The thing named does not exist (namespace, policy, node, pin)."""

    code = "not_found"
    http_status = 404


class UnknownNode(NotFound):
    """What a node said was under a registration that is over, or the node is dead to this master: it registers again."""

    code = "unknown_node"


class Unauthorized(UmbpError):
    """A token is needed, or the one given is wrong."""

    code = "unauthorized"
    http_status = 401


class Conflict(UmbpError):
    """The name is taken: a live pool of this name, a folder with an owner, a port in use."""

    code = "conflict"
    http_status = 409


class ProtocolError(UmbpError):
    """A peer sent what the protocol does not allow; its connection is closed, others are untouched."""

    code = "protocol_error"
    http_status = 400


# -- retry or go elsewhere ---------------------------------------------------------------------------------------------------------


class Unavailable(UmbpError):
    """The pool cannot be reached now; it may be restarting. Reads answer misses meanwhile."""

    code = "unavailable"
    http_status = 503
    retryable = True


class DeadlineExceeded(Unavailable):
    """No answer within the time limit of the call."""

    code = "deadline_exceeded"
    http_status = 504


class LimitReached(UmbpError):
    """A stated limit (sessions, leases, namespaces, bytes leased) is reached; releasing some helps."""

    code = "limit_reached"
    http_status = 429
    retryable = True


class OutOfMemory(UmbpError):
    """The machine does not give the memory that was asked for; says what was found and what to change."""

    code = "out_of_memory"
    http_status = 507


# -- recompute ---------------------------------------------------------------------------------------------------------------------


class LeaseLost(UmbpError):
    """A lease ran out (the process was stopped for longer than it lasts) or the pool restarted; bytes read under it do not count."""

    code = "lease_lost"
    http_status = 410


class SegmentError(UmbpError):
    """A shared-memory file is not what its header says, or not of a version this code reads."""

    code = "bad_segment"


def _tree(root: type[UmbpError]) -> dict[str, type[UmbpError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[UmbpError]] = _tree(UmbpError)


def from_wire(code: str, message: str, field: str = "") -> UmbpError:
    """The error that a server named, as the same class. An unknown code becomes the root class."""
    error = BY_CODE.get(code, UmbpError)(message)
    error.field = field
    return error
