"""layer-order: layers in the order in which they were asked for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probing import SET_UP_BY_HAND, WORKER, Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.layer_order import SHIM, in_asked_order


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(WORKER).splitlines()[(finding.line or 0) - 1]
        assert "frozenset(layer_ids)" in line


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*SET_UP_BY_HAND),
        installed.without(WORKER),
        installed.without_text(WORKER),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


LAYER_IDS = st.lists(st.integers(0, 200), unique=True, max_size=12)


@given(asked=LAYER_IDS)
def test_each_place_holds_the_layer_that_was_asked_for_there(asked: list[int]) -> None:
    ascending = [f"state of {layer_id}" for layer_id in sorted(asked)]
    assert in_asked_order(asked, ascending) == [f"state of {layer_id}" for layer_id in asked]


class Extension:
    def __init__(self, by_request: bool = False) -> None:
        self._by_request = by_request

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        self._layer_ids = frozenset(layer_ids)

    def _get_captured_states(self) -> Any:
        if not self._layer_ids:
            return None
        states = [f"state of {layer_id}" for layer_id in sorted(self._layer_ids)]
        return {"req_0_0": states, "req_0_1": states} if self._by_request else states


@pytest.fixture
def module() -> ModuleType:
    return module_with(WORKER, HiddenStatesWorkerExtension=Extension)


EXPECTED = ["state of 7", "state of 2", "state of 5"]


@pytest.mark.parametrize("as_keyword", [False, True])
def test_states_are_reordered(module: ModuleType, as_keyword: bool) -> None:
    with carried_out(module, SHIM.id):
        extension = module.HiddenStatesWorkerExtension()
        if as_keyword:
            extension._setup_hidden_states_capture(layer_ids=[7, 2, 5])
        else:
            extension._setup_hidden_states_capture([7, 2, 5])
        assert extension._get_captured_states() == EXPECTED


def test_states_by_request_are_reordered(module: ModuleType) -> None:
    with carried_out(module, SHIM.id):
        extension = module.HiddenStatesWorkerExtension(by_request=True)
        extension._setup_hidden_states_capture([7, 2, 5])
        assert extension._get_captured_states() == {"req_0_0": EXPECTED, "req_0_1": EXPECTED}


def test_no_states_stay_none(module: ModuleType) -> None:
    with carried_out(module, SHIM.id):
        extension = module.HiddenStatesWorkerExtension()
        extension._setup_hidden_states_capture([])
        assert extension._get_captured_states() is None


def test_what_was_asked_for_is_not_changed_by_the_caller_later(module: ModuleType) -> None:
    asked = [7, 2, 5]
    with carried_out(module, SHIM.id):
        extension = module.HiddenStatesWorkerExtension()
        extension._setup_hidden_states_capture(asked)
        asked.sort()
        assert extension._get_captured_states() == EXPECTED
