"""The `umbp` command."""

from umbp.cli.app import main

__all__ = ["main"]
