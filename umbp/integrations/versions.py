"""Which engine versions an integration was run with, and what is said of others."""

from __future__ import annotations

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


def remark(engine: str, known: tuple[str, ...]) -> str:
    """A line for the log where the version is another and everything needed is there; "" where it is a known one."""
    version = installed(engine)
    is_known = version.partition("+")[0] in known  # also as a build for some accelerator, such as 0.33.0+rocm
    return "" if is_known else f"{engine} {version} was not run with this version of umbp (it was with {', '.join(known)})"
