"""The pool process: `python -m umbp.pool`."""
