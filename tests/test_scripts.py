"""The scripts: they parse, are executable, and stop on the first error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERBS = [ROOT / "scripts" / name for name in ("run", "test", "check", "test_engines", "demo_group")] + [ROOT / ".ci" / "run"]


def bash(command: str, *, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ, PATH=path or os.environ["PATH"])
    return subprocess.run(["/bin/bash", "-c", command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("script", [*VERBS, ROOT / "scripts" / "env"], ids=lambda path: path.name)
def test_a_script_parses(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).stderr == b""


@pytest.mark.parametrize("script", VERBS, ids=lambda path: path.name)
def test_a_verb_can_be_called_and_stops_on_errors(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script.read_text()


@pytest.mark.parametrize("list_", sorted((ROOT / "tests/engines").glob("*/requirements.txt")), ids=lambda path: path.parent.name)
def test_an_engines_environment_has_all_that_the_pool_needs(list_: Path) -> None:
    """They are installed without what their packages ask for, so that engines get exactly the versions that were tried."""

    def name(line: str) -> str:
        return re.split(r"[<>=!~\[ ;]", line, maxsplit=1)[0].lower().replace("_", "-")

    needed = {name(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    there = {name(line) for line in list_.read_text().splitlines() if line and not line.startswith("#")}
    assert needed <= there, f"add to {list_}: {sorted(needed - there)}"


def test_no_script_installs_torch_unasked() -> None:
    for script in [*VERBS, ROOT / "scripts" / "env"]:
        lines = script.read_text().splitlines()
        for number, line in enumerate(lines):
            if "install" in line and "torch==" in line:
                assert any("UMBP_WITH_TORCH" in before and "! has" in before for before in lines[number - 3 : number])
    assert "torch" not in " ".join(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.strip().startswith('"torch'))


def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing but what the scripts need, and no environment."""
    (tmp_path / "scripts").mkdir()
    for name in ("env", "run"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_without_a_python_the_message_says_what_is_needed(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "bash", "flock", "cat"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    old = tools / "python3"
    old.write_text('#!/bin/bash\n[ "$1" = --version ] && echo \'Python 3.9.1\'\n[ "$1" = --version ]\n')
    old.chmod(0o755)
    root = checkout(tmp_path)
    done = bash(f"{root}/scripts/run", cwd=Path("/"), path=str(tools))
    assert done.returncode != 0
    assert "Python 3.11 or later is needed; found: Python 3.9.1" in done.stderr
    assert done.stdout == ""
    assert not (root / ".venv").exists()


FAKE_PYTHON = """#!/bin/bash
case "$*" in
    *"-m pip install"*) echo "$*" >>{log} ;;
    *hashlib*) exec {python} "$@" ;;
    *) [ "$1" = -c ] || echo "$*" ;;
esac
"""


def test_an_environment_is_filled_once_and_again_when_the_project_changes(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    log, fake = root / "log", root / ".venv/bin/python"
    fake.parent.mkdir(parents=True)
    fake.write_text(FAKE_PYTHON.format(log=log, python=sys.executable))
    fake.chmod(0o755)

    def run() -> int:
        done = bash(f"{root}/scripts/run --dram '64 MiB'", cwd=Path("/"))
        assert (done.returncode, done.stdout) == (0, "-m umbp.pool --dram 64 MiB\n"), done.stderr
        return len(log.read_text().splitlines())

    assert [run(), run()] == [1, 1]
    (root / "pyproject.toml").write_text((root / "pyproject.toml").read_text() + "# changed\n")
    assert [run(), run()] == [2, 2]
    assert bash(f"source {root}/scripts/env test", cwd=Path("/")).returncode == 0
    assert log.read_text().splitlines()[-1].endswith(f"--editable {root}[test]")
    assert run() == 3


def test_the_torch_of_an_active_environment_is_seen(tmp_path: Path) -> None:
    """An environment made from another one's Python sees the packages of the system, which are not those of the other."""
    root, engine, tools = checkout(tmp_path), tmp_path / "engine", tmp_path / "tools"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(engine)], check=True, timeout=60)
    (packages,) = engine.glob("lib/python*/site-packages")
    (packages / "torch.py").write_text("mark = 'of the engine'\n")
    tools.mkdir()
    quick = tools / "python3"  # pip is what takes the time
    quick.write_text(f'#!/bin/bash\n[ "$1 $2" = "-m venv" ] && set -- -m venv --without-pip "${{@:3}}"\nexec {engine}/bin/python "$@"\n')
    quick.chmod(0o755)
    # What `prepare` does beyond making the environment asks a registry, and is left out.
    made = bash(
        f"source <(sed '/^prepare$/d' {root}/scripts/env) run; root={root} python={root}/.venv/bin/python; make_venv",
        cwd=Path("/"),
        path=f"{tools}:{os.environ['PATH']}",
    )
    assert made.returncode == 0, made.stderr
    asked = bash(f"{root}/.venv/bin/python -c 'import torch; print(torch.mark)'", cwd=Path("/"))
    assert asked.stdout == "of the engine\n", asked.stderr
