"""How the plug-in meets vLLM: registered once, beside no other, with options that are right, and a clear word about versions."""

from __future__ import annotations

import importlib
import sys
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector import v1
from vllm.distributed.kv_transfer.kv_connector.v1.umbp import UMBPRuntimeFactory
from vllm.v1.kv_offload.base import OffloadingManager

from tests.engines.vllm.world import Options, World, config
from tests.pools import PoolProcess
from umbp.errors import ConfigError, Unavailable
from umbp.integrations import versions
from umbp.integrations import vllm as plugin


class Factory:
    """vLLM's factory, another one."""

    _builders: dict[str, Any]
    register = classmethod(UMBPRuntimeFactory.register.__func__)  # type: ignore[attr-defined]
    build = classmethod(UMBPRuntimeFactory.build.__func__)  # type: ignore[attr-defined]


@pytest.fixture
def factory() -> type[Factory]:
    return type("Empty", (Factory,), {"_builders": {}})


def test_registering_twice_is_once(factory: type[Factory]) -> None:
    plugin.register(factory)
    plugin.register(factory)
    assert list(factory._builders) == ["embedded"]


def load_again(name: str) -> None:
    there = sys.modules.pop(name)
    try:
        importlib.import_module(name)
    finally:
        sys.modules[name] = there


def test_a_module_that_is_loaded_again_finds_itself_registered() -> None:
    load_again("umbp.integrations.vllm")


def test_another_runtime_is_not_pushed_aside(factory: type[Factory]) -> None:
    factory._builders["embedded"] = lambda config: None
    with pytest.raises(ConfigError, match="another UMBP runtime"):
        plugin.register(factory)


def test_without_our_connector_the_runtime_says_which_module_to_name() -> None:
    with pytest.raises(ConfigError, match=r"umbp\.integrations\.vllm"):
        UMBPRuntimeFactory.build(plugin.upstream.UMBPRuntimeConfig("embedded", {}))


@pytest.mark.parametrize("name", ["umbp.integrations.vllm", "umbp.integrations.vllm_offloading"])
def test_a_version_that_was_not_run_is_named_once(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    importlib.import_module(name)
    load_again(name)
    assert caplog.text == ""
    monkeypatch.setattr(versions, "installed", lambda engine: "0.41.0")
    load_again(name)
    assert "vllm 0.41.0 was not run with this version of umbp (it was with 0.33.0)" in caplog.text


def test_a_vllm_whose_worker_is_another_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(plugin.UMBPStoreConnectorWorker, "_drain_load_jobs")
    with pytest.raises(ImportError, match=r"does not fit \(.*lacks _drain_load_jobs.*vllm==0\.33\.0"):
        load_again("umbp.integrations.vllm")


def test_a_vllm_without_the_connector_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.umbp", None)
    monkeypatch.delattr(v1, "umbp")
    with pytest.raises(ImportError, match=r"does not fit \(.*v1\.umbp.*vllm==0\.33\.0"):
        load_again("umbp.integrations.vllm")


def test_a_vllm_that_asks_more_of_an_offloading_spec_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("umbp.integrations.vllm_offloading")

    @abstractmethod
    def new(self: Any) -> None: ...

    monkeypatch.setattr(OffloadingManager, "new_in_0_41", new, raising=False)
    monkeypatch.setattr(OffloadingManager, "__abstractmethods__", OffloadingManager.__abstractmethods__ | {"new_in_0_41"})
    with pytest.raises(ImportError, match="OffloadingManager also has new_in_0_41"):
        load_again("umbp.integrations.vllm_offloading")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"umbp_pol": "/x"}, "umbp_pol"),
        ({"umbp_pool": 7}, "umbp_pool"),
        ({"umbp_tenant": 1}, "umbp_tenant"),
        ({"umbp_deadline_seconds": 0}, "umbp_deadline_seconds"),
        ({"umbp_deadline_seconds": "10"}, "umbp_deadline_seconds"),
        ({"umbp_deadline_seconds": True}, "umbp_deadline_seconds"),
        ({"umbp_group": "yes"}, "umbp_group"),
    ],
)
def test_an_option_that_is_wrong_stops_the_start(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        plugin.settings_of(config(Options("/tmp/pool", extra=options), 0), None)


@pytest.mark.parametrize("name", plugin.LEFT_OUT)
def test_what_vllms_own_namespace_leaves_out_is_part_of_the_identity(name: str, server: PoolProcess) -> None:
    one, two = config(Options(server.socket), 0), config(Options(server.socket), 0)
    assert plugin.settings_of(one, None).engine == plugin.settings_of(two, None).engine
    object.__setattr__(two.model_config, name, "another")
    assert plugin.settings_of(one, None).engine != plugin.settings_of(two, None).engine


def test_no_pool_stops_the_start_with_what_to_do(server: PoolProcess) -> None:
    with pytest.raises(Unavailable, match=r"python -m umbp\.pool"):
        World(Options(f"{server.folder}/no.sock"))


def test_workers_that_differ_stop_the_start(server: PoolProcess) -> None:
    with World(Options(server.socket, tp=2)) as world:
        told = [worker.connector.get_handshake_metadata() for worker in world.workers]
        other = replace(told[1], groups=tuple(replace(group, sizes=group.sizes[1:]) for group in told[1].groups))
        with pytest.raises(ConfigError, match="different models or layouts"):
            world.scheduler.connector.set_xfer_handshake_metadata({0: told[0], 1: other})
