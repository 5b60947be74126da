"""`umbp doctor`: what this machine lacks for a pool, as a table."""

from __future__ import annotations

import dataclasses
import os

import typer

from umbp import doctor as examination
from umbp.cli.target import AsJson, cell, console, print_json, table

STYLES = {"ok": "green", "info": "dim", "warn": "yellow", "bad": "bold red"}


def doctor(as_json: AsJson = False) -> None:
    """Check this machine for a pool: memory, limits, huge pages, NUMA, GPU, leftovers. Ends with 1 if something is bad."""
    findings = examination.examine(os.environ)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        made = table("", "what", "found", "what to change")
        for finding in findings:
            made.add_row(cell(finding.status, STYLES[finding.status]), cell(finding.name), cell(finding.found), cell(finding.advice))
        console().print(made)
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(1)
