"""kv-cache-layout: the layout is resolved where there is no engine core to do it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import Status
from eagle3compat.shims.kv_cache_layout import SHIM

EXECUTOR = "vllm.v1.executor.multiproc_executor"
BASE = "vllm.v1.executor.abstract"
UTILS = "vllm.v1.attention.backends.utils"
METHODS = ("set_kv_cache_layout", "get_supported_kv_cache_layouts")
PARAMETERS = "vllm_config, supported_layouts, kv_cache_specs=None"


def resolving(
    builds: Builds, methods: tuple[str, ...] = METHODS, parameters: str | None = PARAMETERS
) -> Builds:
    """A vLLM whose engine core resolves the layout."""
    anchor = "    def sample_tokens("
    added = "".join(f"    def {name}(self, *args): ...\n\n" for name in methods)
    changed = builds.edited(EXECUTOR, anchor, added + anchor)
    if parameters is None:
        return changed
    anchor = "def get_kv_cache_layout():"
    return changed.edited(
        UTILS, anchor, f"def resolve_kv_cache_layout({parameters}): ...\n\n\n{anchor}"
    )


def test_not_needed_where_nothing_is_to_be_resolved(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        assert builds.probe(SHIM).status is Status.NOT_NEEDED


def test_needed_where_the_engine_core_resolves_it(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        assert resolving(builds).probe(SHIM).status is Status.NEEDED


def test_drift_where_it_is_resolved_in_another_way(installed: Builds) -> None:
    for builds in (
        resolving(installed, parameters=None),
        resolving(installed, parameters="vllm_config, kv_cache_specs"),
        resolving(installed, parameters="vllm_config, kv_cache_specs, supported_layouts"),
        resolving(installed, methods=METHODS[:1]),
        resolving(installed).without(UTILS),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_drift_where_the_executor_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.without(EXECUTOR),
        installed.without_text(EXECUTOR),
        installed.garbled(EXECUTOR),
        installed.without(BASE),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


class Executor:
    def __init__(self) -> None:
        self.vllm_config = "config"
        self.layout: Any = None

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "get_kv_cache_spec":
            return [{"layers.0": "full", "layers.1": "sliding"}, {"layers.0": "full"}]
        return method, args, kwargs

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["NHD", "HND"]]

    def set_kv_cache_layout(self, layout: str) -> None:
        self.layout = layout


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Let the adapter find vLLM's function."""
    function = Recorder(SimpleNamespace(name="HND"))
    parts = UTILS.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, module_with(name))
    monkeypatch.setitem(sys.modules, UTILS, module_with(UTILS, resolve_kv_cache_layout=function))
    return function


def test_the_layout_is_settled_when_the_specs_are_known(resolve: Recorder) -> None:
    module = module_with(GENERATOR, MultiprocExecutor=Executor)
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor()
        specs = executor.collective_rpc("get_kv_cache_spec")
    assert specs == [{"layers.0": "full", "layers.1": "sliding"}, {"layers.0": "full"}]
    assert resolve.calls == [(("config", [["NHD", "HND"]], ["full", "sliding", "full"]), {})]
    assert executor.layout == "HND"
    assert settled.choices()[SHIM.id] == "HND"


def test_other_calls_are_passed_on_untouched(resolve: Recorder) -> None:
    module = module_with(GENERATOR, MultiprocExecutor=Executor)
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor()
        assert executor.collective_rpc("ping", 1, timeout=2) == ("ping", (1,), {"timeout": 2})
    assert executor.layout is None
    assert resolve.calls == []
