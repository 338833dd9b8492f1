"""current-config: a step that makes custom ops needs vLLM's current config."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import WORKER, carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.current_config import SHIM

CONFIG = "vllm.config.vllm"


def test_needed_with_every_vllm_that_has_a_current_config(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert "custom op" in (finding.conditional or "")


def test_drift_where_the_config_cannot_be_set(installed: Builds) -> None:
    for builds in (
        installed.edited(CONFIG, "def set_current_vllm_config(", "def use_vllm_config("),
        installed.without(CONFIG),
        installed.without_text(CONFIG),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs that are set now, the innermost last."""
    stack: list[Any] = []

    @contextmanager
    def set_current_vllm_config(config: Any) -> Iterator[None]:
        stack.append(config)
        try:
            yield
        finally:
            stack.pop()

    config = module_with("vllm.config", set_current_vllm_config=set_current_vllm_config)
    monkeypatch.setitem(sys.modules, "vllm", module_with("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    return stack


def test_the_workers_config_is_set_for_the_step_and_no_longer(current: list[Any]) -> None:
    def forward(self: Any, ids: Any, *, fail: bool = False) -> Any:
        if fail:
            raise FloatingPointError
        return ids, list(current)

    decoder = SimpleNamespace(_extension=SimpleNamespace(vllm_config="the worker's"))
    module = module_with(WORKER, _patched_forward=forward)
    with carried_out(module, SHIM.id):
        decoder.forward = MethodType(module._patched_forward, decoder)
        assert decoder.forward([1, 2]) == ([1, 2], ["the worker's"])
        with pytest.raises(FloatingPointError):
            decoder.forward([1, 2], fail=True)
    assert current == []


def test_it_is_set_round_the_forward_of_model_forward(current: list[Any]) -> None:
    """model-forward rebinds the same name and comes first: otherwise this one would be dropped."""

    class Decoder:
        _extension = SimpleNamespace(
            vllm_config="the worker's", _layer_ids=frozenset(), _store_captured_states=lambda _: 0
        )

        def forward(self) -> list[Any]:
            return list(current)

    def forward(self: Any) -> None:
        raise AssertionError("the consumer's own was called")

    module = module_with(
        WORKER,
        _patched_forward=forward,
        get_tp_group=lambda: SimpleNamespace(rank_in_group=0),
    )
    decoder: Any = Decoder()
    with carried_out(module, SHIM.id, "model-forward"):
        decoder.forward = MethodType(module._patched_forward, decoder)
        assert decoder.forward() == ["the worker's"]
