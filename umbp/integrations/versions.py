"""Which engine versions an integration was run with, and what is said of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata


def installed(engine: str) -> str:
    """The engine's version as it is installed, or "not installed"."""
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:
        return "not installed"


def does_not_fit(engine: str, known: tuple[str, ...], what: str) -> ImportError:
    """What to raise where the engine is not what this integration was written for; ``what`` is the difference that was met."""
    return ImportError(
        f"this integration was run with {engine} {', '.join(known)}; installed here: {installed(engine)}, which does not fit ({what}). "
        f"Install {engine}=={known[-1]}, or a version of umbp that knows this one."
    )


@contextmanager
def fitting(engine: str, known: tuple[str, ...]) -> Iterator[None]:
    """Around what is made of an engine's objects, also as a decorator: what they lack, or take otherwise, is `does_not_fit`."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise does_not_fit(engine, known, f"{type(error).__name__}: {error}") from error


def remark(engine: str, known: tuple[str, ...]) -> str:
    """A line for the log where the version is another and everything needed is there; "" where it is a known one."""
    version = installed(engine)
    is_known = version.partition("+")[0] in known  # also as a build for some accelerator, such as 0.33.0+rocm
    return "" if is_known else f"{engine} {version} was not run with this version of umbp (it was with {', '.join(known)})"
