"""repeated-layers: the worker would drop a layer that is asked for twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probing import SET_UP_BY_HAND, WORKER, Builds
from standins import GENERATOR, carried_out, module_with

from eagle3compat.errors import InputError
from eagle3compat.shim import Status
from eagle3compat.shims.repeated_layers import SHIM, check_distinct


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        assert builds.probe(SHIM).status is Status.NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*SET_UP_BY_HAND),
        installed.without(WORKER),
        installed.without_text(WORKER),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


@given(layer_ids=st.lists(st.integers(0, 6), max_size=8))
def test_exactly_lists_with_a_repeated_layer_are_refused(layer_ids: list[int]) -> None:
    if len(set(layer_ids)) == len(layer_ids):
        check_distinct(layer_ids)
    else:
        with pytest.raises(InputError):
            check_distinct(layer_ids)


@pytest.mark.parametrize("layers", range(4, 7))
def test_the_default_layers_of_small_models_are_refused(layers: int) -> None:
    default = [2, layers // 2, layers - 3, layers - 1]
    with pytest.raises(InputError, match="default ones coincide"):
        check_distinct(default)


def test_the_message_names_every_repeated_layer_once() -> None:
    with pytest.raises(InputError, match=r"which repeats 1, 3\. "):
        check_distinct([3, 1, 3, 1, 3, 2])


class Generator:
    def __init__(self, layer_ids: list[int]) -> None:
        self.layer_ids = layer_ids

    def _create_vllm_config(self, **options: Any) -> Any:
        return options


def test_the_check_comes_before_the_engines_config() -> None:
    module = module_with(GENERATOR, VllmHiddenStatesGenerator=Generator)
    with carried_out(module, SHIM.id):
        config = module.VllmHiddenStatesGenerator([1, 2])._create_vllm_config(max_model_len=5)
        with pytest.raises(InputError, match="repeats 2"):
            module.VllmHiddenStatesGenerator([2, 2])._create_vllm_config(max_model_len=5)
    assert config == {"max_model_len": 5}
