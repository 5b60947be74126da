"""The calls into a GPU's runtime, against a library that is built here: arguments, results, errors, and what is left behind after one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
import torch

from umbp.loader.driver import ADVICE, Driver, loaded
from umbp.loader.gpu import GpuRuntime
from umbp.loader.runtime import Fault

KINDS = ["hip", "cuda"]
ALIAS = 0x100000000000
SOURCE = Path(__file__).parent / "fake_driver.c"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    folder = tmp_path_factory.mktemp("driver")
    built = {}
    for kind in KINDS:
        built[kind] = str(folder / f"lib{kind}.so")
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-DPREFIX={kind}", "-o", built[kind], str(SOURCE)]
        subprocess.run(command, check=True, timeout=60)
    return built


class Called:
    """The library of one kind, and what was called."""

    def __init__(self, kind: str, library: str, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self._patch = log, monkeypatch
        monkeypatch.setenv("FAKE_LOG", str(log))
        self.driver = Driver(kind, library, library)

    def fail(self, name: str) -> None:
        self._patch.setenv("FAKE_FAIL", name)

    def calls(self) -> list[tuple[str, int, int, int]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(name, int(a, 16), int(b, 16), int(c, 16)) for name, a, b, c in map(str.split, lines)]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls()]


@pytest.fixture(params=KINDS)
def called(request: pytest.FixtureRequest, libraries: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Called:
    return Called(request.param, libraries[request.param], tmp_path / "log", monkeypatch)


def test_host_memory_is_registered_portable_and_mapped_and_its_alias_is_asked_for(called: Called) -> None:
    address, size = 0x7F1234567000, 100 << 30
    assert called.driver.register(address, size) == address + ALIAS
    called.driver.unregister(address)
    assert called.calls() == [
        ("HostRegister", address, size, 3),
        ("HostGetDevicePointer", address, 0, 0),
        ("HostUnregister", address, 0, 0),
    ]


def test_memory_without_an_alias_is_unregistered_again(called: Called) -> None:
    called.fail("HostGetDevicePointer")
    with pytest.raises(Fault, match="HostGetDevicePointer"):
        called.driver.register(0x1000, 4096)
    assert called.names() == ["HostRegister", "HostGetDevicePointer", "GetLastError", "HostUnregister"]


def test_memory_for_signals_is_uncached_where_that_exists_and_zeroed(called: Called) -> None:
    address = called.driver.allocate(8192)
    assert ctypes.string_at(address, 8192) == bytes(8192)
    called.driver.free(address)
    hip = called.driver.kind == "hip"
    assert called.calls()[0] == ("ExtMallocWithFlags", 0, 8192, 3) if hip else ("Malloc", address, 8192, 0)
    assert called.calls()[1:] == [("Memset", address, 0, 8192), ("Free", address, 0, 0)]


def test_memory_for_signals_is_plain_where_there_is_no_other(called: Called) -> None:
    called.fail("ExtMallocWithFlags")
    called.driver.free(called.driver.allocate(64))
    flags = [call[3] for call in called.calls() if call[0] == "ExtMallocWithFlags"]
    assert flags == ([3, 1, 0] if called.driver.kind == "hip" else [])
    assert "Malloc" in called.names()


def test_a_handle_goes_by_value_all_64_bytes_of_it(called: Called) -> None:
    base, size = called.driver.extent(0x7F0000012345)
    assert (base, size) == (0x7F0000010000, 0x10000)
    handle = called.driver.handle(base)
    assert len(handle) == 64
    assert called.driver.open(handle) == base + 0x1000
    called.driver.close(base + 0x1000)
    assert called.calls() == [
        ("IpcGetMemHandle", base, 0, 0),
        ("IpcOpenMemHandle", base, 7, 1),
        ("IpcCloseMemHandle", base + 0x1000, 0, 0),
    ]


def test_where_a_device_is_on_the_bus(called: Called) -> None:
    assert called.driver.bus(1) == "0000:C1:00.0"


@pytest.mark.parametrize("name", sorted(ADVICE))
def test_a_failure_says_what_failed_why_and_what_to_do(called: Called, name: str) -> None:
    driver = called.driver
    called.fail("ExtMallocWithFlags Malloc" if name == "Malloc" else name)
    steps = {
        "HostRegister": lambda: driver.register(4096, 4096),
        "HostGetDevicePointer": lambda: driver.register(4096, 4096),
        "HostUnregister": lambda: driver.unregister(4096),
        "Malloc": lambda: driver.allocate(64),
        "Memset": lambda: driver.allocate(64),
        "Free": lambda: driver.free(0),
        "MemGetAddressRange": lambda: driver.extent(4096),
        "IpcGetMemHandle": lambda: driver.handle(4096),
        "IpcOpenMemHandle": lambda: driver.open(bytes(64)),
        "IpcCloseMemHandle": lambda: driver.close(4096),
        "DeviceGetPCIBusId": lambda: driver.bus(0),
    }
    with pytest.raises(Fault) as caught:
        steps[name]()
    text = str(caught.value)
    assert text.startswith(driver.kind + name)
    assert "2 (out of memory)" in text
    assert text.endswith(ADVICE[name])
    assert "GetLastError" in called.names(), "torch would find the error and raise it as its own"


def test_a_library_that_is_not_loaded_is_said() -> None:
    assert loaded(r"libc\.so[.\d]*").startswith("/")
    with pytest.raises(Fault, match="libamdhip64"):
        loaded(r"libamdhip64\.so[.\d]*")


def test_a_gpus_runtime_hands_memory_to_the_driver_on_its_device(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        devices.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", on)
    runtime, memory = GpuRuntime(torch.device("cuda", 3), called.driver), np.zeros(8192, np.uint8)
    assert runtime.register(memory) == memory.ctypes.data + ALIAS
    runtime.unregister(memory)
    address = runtime.allocate(100)
    assert ctypes.string_at(address, 2 << 20) == bytes(2 << 20), "a block of its own, so that its handle opens nothing else"
    shared = runtime.share(0x7F0000012345)
    assert shared.offset == 0x2345
    opened = runtime.open(shared.handle)
    assert opened == 0x7F0000010000 + 0x1000
    runtime.close(opened)
    runtime.free(address)
    assert set(devices) == {torch.device("cuda", 3)}
    assert called.names()[:3] == ["HostRegister", "HostGetDevicePointer", "HostUnregister"]


def test_a_gpu_without_its_library_is_a_fault_when_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    runtime = GpuRuntime(torch.device("cuda", 0))
    with pytest.raises(Fault, match="pinned buffer instead"):
        runtime.allocate(64)
