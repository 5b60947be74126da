"""The house rules that a program can check: layers, purity, sizes, names, and nothing that runs what it reads.

Each rule is a function from one module to its faults; `RULES` lists them. They are run over the tree, and each is shown to fire on
planted sources below: a rule that never fires proves nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A part imports itself and parts of lower floors, never its neighbours: so pool and loader cannot meet.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"types", "errors"}),
    frozenset({"grammar", "blob"}),
    frozenset({"options", "frames"}),
    frozenset({"answers"}),
    frozenset({"config", "machine", "process", "layout", "metrics", "waiting", "wire", "policies", "kernels"}),
    frozenset({"core", "store", "admin"}),
    frozenset({"transport"}),
    frozenset({"client", "sim", "master"}),
    frozenset({"pool", "loader", "doctor", "replay", "per_node"}),
    frozenset({"cli", "integrations"}),
)
# The one step sideways: the index is arrays and arithmetic, so the pure pool writes it; it is held pure like the core.
SIDEWAYS = {("core", "umbp.store.index")}
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
FACE = "__init__"  # umbp/__init__.py hands names on and so stands above all; nothing inside imports it

ONLY_IN = {
    "torch": {"kernels", "loader", "integrations"},
    "triton": {"kernels"},
    "aiohttp": {"master", "pool", "admin", "client", "transport"},
    "sglang": {"integrations"},
    "vllm": {"integrations"},
}
PURE = ("umbp/core/", "umbp/policies/", "umbp/store/index.py")
# fmt: off
IMPURE = {
    "time", "datetime", "random", "secrets", "uuid", "os", "sys", "platform", "io", "pathlib", "glob", "shutil", "tempfile", "mmap",
    "fcntl", "ctypes", "socket", "socketserver", "ssl", "select", "selectors", "asyncio", "uvloop", "threading", "multiprocessing",
    "concurrent", "subprocess", "signal", "sched", "queue", "http", "urllib", "logging",
}
# fmt: on
IMPURE_CALLS = {"open", "input", "print"}
UNSAFE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {"torch.load", "torch.save", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
BAD_WORDS = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc", "v2", "old", "legacy", "experimental"}
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True)
class Module:
    """A source file: ``path`` is relative to the checkout."""

    path: str
    source: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The name that the layers go by: what stands right below umbp/."""
        names = self.path.removeprefix("umbp/").removesuffix(".py").split("/")
        return names[0]

    def at(self, node: ast.AST, text: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {text}"


def parse(path: str, source: str) -> Module:
    return Module(path, source, ast.parse(source, path))


def imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """What is imported, dotted, also inside functions and under TYPE_CHECKING. ``from umbp import x`` counts as umbp.x."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node, name.value


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


# -- rules -------------------------------------------------------------------------------------------------------------------------


def layers(module: Module) -> Iterator[str]:
    if not module.path.startswith("umbp/") or module.part == FACE:
        return
    if module.part not in FLOOR:
        yield f"{module.path}: {module.part} has no floor; give it one in tests/test_tidy.py"
        return
    for node, name in imports(module):
        if name.startswith("."):
            yield module.at(node, "a relative import")
        elif name.partition(".")[0] == "umbp":
            target = (name + ".").split(".")[1]
            if target not in FLOOR:
                yield module.at(node, f"{name} is the package's face or has no floor")
            elif any(part == module.part and (name + ".").startswith(path + ".") for part, path in SIDEWAYS):
                continue
            elif target != module.part and FLOOR[target] >= FLOOR[module.part]:
                yield module.at(node, f"{module.part} imports {target}, which is not below it")


def outside_packages(module: Module) -> Iterator[str]:
    if not module.path.startswith("umbp/"):
        return
    for node, name in imports(module):
        allowed = ONLY_IN.get(name.partition(".")[0])
        if allowed is not None and module.part not in allowed:
            yield module.at(node, f"{name} is imported only in {', '.join(sorted(allowed))}")


def purity(module: Module) -> Iterator[str]:
    if not module.path.startswith(PURE):
        return
    for node, name in imports(module):
        if name.partition(".")[0] in IMPURE:
            yield module.at(node, f"{name} in the pure core: time, randomness and I/O are arguments")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and dotted(node.func) in IMPURE_CALLS:
            yield module.at(node, f"{dotted(node.func)}() in the pure core")
        elif isinstance(node, ast.Attribute) and dotted(node) in ("np.random", "numpy.random"):
            yield module.at(node, "randomness in the pure core")
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await):
            yield module.at(node, "async in the pure core")


def safety(module: Module) -> Iterator[str]:
    if not module.path.startswith("umbp/"):
        return
    for node, name in imports(module):
        if name.partition(".")[0] in UNSAFE or name in UNSAFE_ATTRIBUTES:
            yield module.at(node, f"{name} runs what it reads")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in UNSAFE_ATTRIBUTES:
            yield module.at(node, f"{dotted(node)} runs what it reads")
        elif isinstance(node, ast.Call):
            if dotted(node.func) in UNSAFE_CALLS:
                yield module.at(node, f"{dotted(node.func)}() runs what it reads")
            for keyword in node.keywords:
                unwanted = keyword.arg in ("allow_pickle", "shell")
                if unwanted and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                    yield module.at(node, f"{keyword.arg}= other than False")


def sizes(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > MODULE_LINES_MAX:
        yield f"{module.path}: {lines} lines are more than {MODULE_LINES_MAX}; split it"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield module.at(node, f"{node.name} has {length} lines, more than {FUNCTION_LINES_MAX}")


def docstrings(module: Module) -> Iterator[str]:
    text = ast.get_docstring(module.tree, clean=False) or ""
    first = text.splitlines()[0].strip() if text else ""
    if not first:
        yield f"{module.path}: no docstring whose first line says what the module is"
    elif first[-1] not in ".:?!":
        yield f"{module.path}: the docstring's first line is not one sentence: {first!r}"


def names(module: Module) -> Iterator[str]:
    for word in re.split(r"[/_.]", module.path):
        if word in BAD_WORDS:
            yield f"{module.path}: {word!r} says nothing about what is inside"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and node.name.lower().endswith(("manager", "helper", "utils", "util")):
            yield module.at(node, f"class {node.name}: name what it is, not that it manages")


def bare_init(module: Module) -> Iterator[str]:
    """``__init__`` hands names on and does nothing else. A lazy ``__getattr__`` is a way of handing on."""
    if Path(module.path).name != "__init__.py":
        return
    for node in module.tree.body:
        function = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.If)
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (function or plain or constant):
            yield module.at(node, "__init__ does more than hand names on")


Rule = Callable[[Module], Iterator[str]]
RULES: tuple[Rule, ...] = (layers, outside_packages, purity, safety, sizes, docstrings, names, bare_init)

# -- the tree ----------------------------------------------------------------------------------------------------------------------


def tree() -> list[Module]:
    paths = [path for folder in ("umbp", "tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [parse(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return tree()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_is_tidy(rule: Rule, modules: list[Module]) -> None:
    assert any(module.path == "umbp/config.py" for module in modules)
    faults = [fault for module in modules for fault in rule(module)]
    assert not faults, "\n" + "\n".join(faults)


def test_no_part_stands_on_two_floors() -> None:
    assert len(FLOOR) == sum(map(len, FLOORS))


# -- the rules themselves ----------------------------------------------------------------------------------------------------------

LONG_FUNCTION = "def f() -> None:\n" + "    x = 1\n" * 70
FIRES: list[tuple[Rule, str, str]] = [
    (layers, "umbp/core/a.py", "import umbp.store.segment"),
    (layers, "umbp/store/a.py", "from umbp.core import pool"),
    (layers, "umbp/store/a.py", "from umbp import core"),
    (layers, "umbp/store/a.py", "def f():\n    import umbp.pool"),
    (layers, "umbp/store/a.py", "if TYPE_CHECKING:\n    from umbp.client.session import Session"),
    (layers, "umbp/core/a.py", "from umbp.store import segment"),
    (layers, "umbp/core/a.py", "import umbp.store.indexes"),
    (layers, "umbp/client/a.py", "from umbp.pool import server"),
    (layers, "umbp/pool/a.py", "from umbp.loader.group import Group"),
    (layers, "umbp/loader/a.py", "importlib.import_module('umbp.pool.server')"),
    (layers, "umbp/types.py", "from umbp.errors import UmbpError"),
    (layers, "umbp/core/a.py", "from umbp import Loader"),
    (layers, "umbp/core/a.py", "import umbp"),
    (layers, "umbp/core/a.py", "from .b import c"),
    (layers, "umbp/core/a.py", "from . import b"),
    (layers, "umbp/stray.py", "x = 1"),
    (outside_packages, "umbp/core/a.py", "import torch"),
    (outside_packages, "umbp/doctor.py", "def f():\n    import torch.cuda as c"),
    (outside_packages, "umbp/loader/a.py", "import triton.language as tl"),
    (outside_packages, "umbp/cli.py", "from aiohttp import web"),
    (outside_packages, "umbp/__init__.py", "import torch"),
    (purity, "umbp/core/a.py", "import time"),
    (purity, "umbp/core/a.py", "from os import environ"),
    (purity, "umbp/policies/a.py", "def f():\n    import random"),
    (purity, "umbp/core/a.py", "import numpy as np\nx = np.random.default_rng()"),
    (purity, "umbp/store/index.py", "import mmap"),
    (purity, "umbp/core/a.py", "x = open('y')"),
    (purity, "umbp/core/a.py", "async def f(): pass"),
    (purity, "umbp/core/a.py", "from concurrent.futures import Future"),
    (safety, "umbp/wire.py", "import pickle"),
    (safety, "umbp/wire.py", "from pickle import loads"),
    (safety, "umbp/wire.py", "x = eval(y)"),
    (safety, "umbp/wire.py", "exec(y)"),
    (safety, "umbp/loader/a.py", "x = torch.load(y)"),
    (safety, "umbp/loader/a.py", "from torch import load"),
    (safety, "umbp/store/a.py", "x = np.load(y, allow_pickle=True)"),
    (safety, "umbp/doctor.py", "subprocess.run(y, shell=z)"),
    (sizes, "umbp/wire.py", "x = 1\n" * 501),
    (sizes, "umbp/wire.py", LONG_FUNCTION),
    (sizes, "tests/test_a.py", LONG_FUNCTION.replace("def", "async def")),
    (docstrings, "umbp/wire.py", "x = 1"),
    (docstrings, "umbp/wire.py", '"""\nToo late.\n"""'),
    (docstrings, "umbp/wire.py", '"""A sentence that runs on\nover two lines."""'),
    (names, "umbp/store/utils.py", ""),
    (names, "umbp/common/a.py", ""),
    (names, "tests/cache_helpers.py", ""),
    (names, "umbp/store/segment_v2.py", ""),
    (names, "umbp/store/a.py", "class SegmentManager: pass"),
    (bare_init, "umbp/store/__init__.py", "class A: pass"),
    (bare_init, "umbp/store/__init__.py", "start()"),
    (bare_init, "umbp/store/__init__.py", "def f(): pass"),
]
SILENT: list[tuple[Rule, str, str]] = [
    (layers, "umbp/core/a.py", "from umbp.policies.base import find\nfrom umbp.core import leases\nimport umbp.types"),
    (layers, "umbp/core/a.py", "from umbp.store.index import IndexWriter\nfrom umbp.store import index"),
    (layers, "umbp/pool/a.py", "from umbp.master.server import Master\nfrom umbp.store import segment\nimport socket"),
    (layers, "umbp/cli.py", "from umbp import doctor, config\nimport umbptools"),
    (layers, "umbp/__init__.py", "from umbp.loader import Loader"),
    (layers, "tests/test_a.py", "import umbp\nfrom umbp.pool import server\nfrom umbp.loader import group"),
    (outside_packages, "umbp/kernels/a.py", "import torch, triton"),
    (outside_packages, "umbp/client/a.py", "import aiohttp"),
    (purity, "umbp/core/a.py", "import numpy as np\nimport heapq\ndef f(time, random):\n    return time + random.random()"),
    (purity, "umbp/store/a.py", "import os, time"),
    (
        safety,
        "umbp/core/a.py",
        "import re\nx = re.compile('a')\ny = self.load(z)\nmodel.eval()\nz = np.load(y, allow_pickle=False)",
    ),
    (sizes, "umbp/wire.py", "x = 1\n" * 500),
    (sizes, "umbp/wire.py", "def f() -> None:\n" + "    x = 1\n" * 69),
    (docstrings, "umbp/wire.py", '"""What a message is.\n\nMore."""'),
    (names, "umbp/policies/s3fifo.py", "class Holder: pass"),
    (bare_init, "umbp/__init__.py", '"""Doc."""\nfrom a import b\n__all__ = ["b"]\ndef __getattr__(name): ...'),
]


@pytest.mark.parametrize(("rule", "path", "source"), FIRES)
def test_a_planted_fault_is_found(rule: Rule, path: str, source: str) -> None:
    assert list(rule(parse(path, source)))


@pytest.mark.parametrize(("rule", "path", "source"), SILENT)
def test_what_is_allowed_passes(rule: Rule, path: str, source: str) -> None:
    assert not list(rule(parse(path, source)))


def test_every_rule_has_a_planted_fault() -> None:
    assert {rule for rule, _, _ in FIRES} == set(RULES) == {rule for rule, _, _ in SILENT}
