"""kv-cache-groups: a parameter that vLLM removed, given and left out as vLLM has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from probing import GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.kv_cache_groups import SHIM

UTILS = "vllm.v1.core.kv_cache_utils"
NAME = "get_kv_cache_config_from_groups"
PARAMETERS = (
    "    kv_cache_groups: list[KVCacheGroupSpec],\n    available_memory: int,\n) -> KVCacheConfig:"
)
OLD_PARAMETERS = PARAMETERS.replace(
    "    available", "    kv_cache_specs: dict[str, KVCacheSpec],\n    available"
)


def on_old_vllm(builds: Builds) -> Builds:
    return builds.edited(UTILS, PARAMETERS, OLD_PARAMETERS)


def test_needed_where_the_parameter_is_gone(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert "kv_cache_specs" in finding.reason
    assert NAME in installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


def test_not_needed_where_both_sides_have_it(installed: Builds) -> None:
    assert on_old_vllm(installed).probe(SHIM).status is Status.NOT_NEEDED


def test_not_needed_where_neither_side_has_it(later: Builds) -> None:
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_needed_where_the_later_speculators_meets_an_old_vllm(later: Builds) -> None:
    finding = on_old_vllm(later).probe(SHIM)
    assert finding.status is Status.NEEDED
    assert "kv_cache_specs" in finding.reason


def test_not_needed_where_any_keyword_is_taken(installed: Builds) -> None:
    taking = PARAMETERS.replace("int,\n)", "int,\n    **ignored: Any,\n)")
    assert installed.edited(UTILS, PARAMETERS, taking).probe(SHIM).status is Status.NOT_NEEDED


@pytest.mark.parametrize(
    "parameters",
    [
        PARAMETERS.replace("int,\n)", "int,\n    alignment: int,\n)"),
        PARAMETERS.replace("available_memory", "memory"),
        PARAMETERS.replace("kv_cache_groups", "groups"),
    ],
)
def test_drift_where_more_than_this_changed(installed: Builds, parameters: str) -> None:
    assert installed.edited(UTILS, PARAMETERS, parameters).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_function_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.without(UTILS),
        installed.without_text(UTILS),
        installed.garbled(UTILS),
        installed.edited(UTILS, f"def {NAME}(", "def kv_cache_config("),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_the_argument_is_dropped_where_vllm_does_not_take_it() -> None:
    def from_groups(vllm_config: str, kv_cache_groups: list[Any], available_memory: int) -> Any:
        return vllm_config, kv_cache_groups, available_memory

    module = module_with(GENERATOR, **{NAME: from_groups})
    with carried_out(module, SHIM.id):
        made = getattr(module, NAME)(
            vllm_config="config", kv_cache_groups=[], kv_cache_specs={}, available_memory=5
        )
    assert made == ("config", [], 5)


def test_the_argument_is_added_where_vllm_asks_for_it() -> None:
    def from_groups(
        vllm_config: str, kv_cache_groups: list[Any], kv_cache_specs: Any, available_memory: int
    ) -> Any:
        return kv_cache_specs

    groups = [
        SimpleNamespace(layer_names=["layers.0", "layers.2"], kv_cache_spec="full"),
        SimpleNamespace(layer_names=["layers.1"], kv_cache_spec="sliding"),
    ]
    module = module_with(GENERATOR, **{NAME: from_groups})
    call = {"vllm_config": "config", "kv_cache_groups": groups, "available_memory": 5}
    with carried_out(module, SHIM.id):
        specs = getattr(module, NAME)(**call)
        own = getattr(module, NAME)(**call, kv_cache_specs="the caller's own")
    assert specs == {"layers.0": "full", "layers.2": "full", "layers.1": "sliding"}
    assert own == "the caller's own"
