"""model-forward: the model's own forward runs, and layers are captured beside it."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from probing import FORWARD_BY_HAND, WORKER, Builds
from standins import carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import Status
from eagle3compat.shims.model_forward import SHIM, layer_state


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert finding.conditional


def test_it_points_at_the_name_that_has_gone(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    line = installed.text(WORKER).splitlines()[(finding.line or 0) - 1]
    assert "get_input_embeddings" in line


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*FORWARD_BY_HAND),
        installed.without(WORKER),
        installed.without_text(WORKER),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_the_state_after_a_layer_is_the_sum_with_the_residual() -> None:
    torch = pytest.importorskip("torch")
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 4.0)
    assert torch.equal(layer_state(None, (hidden, residual)), torch.full((2, 3), 5.0))


@pytest.mark.parametrize("with_none", [False, True])
def test_the_state_without_a_residual_is_a_copy(with_none: bool) -> None:
    torch = pytest.importorskip("torch")
    hidden = torch.ones(2, 3)
    state = layer_state(None, (hidden, None) if with_none else hidden)
    hidden.zero_()  # vLLM's norms work in place
    assert torch.equal(state, torch.ones(2, 3))


@pytest.mark.parametrize("output", [None, (), [1, 2], ("not", "tensors"), (1, 2, 3)])
def test_an_answer_of_another_shape_is_refused(output: Any) -> None:
    with pytest.raises(Refusal, match="decoder layer str"):
        layer_state("a layer", output)


def extension_for(*layer_ids: int) -> Any:
    stored: list[Any] = []
    return SimpleNamespace(
        _layer_ids=frozenset(layer_ids), _store_captured_states=stored.append, stored=stored
    )


def decoder_for(extension: Any) -> Any:
    """A decoder whose own forward does more than a loop over its layers."""
    torch = pytest.importorskip("torch")

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, hidden: Any, residual: Any) -> Any:
            if hidden.isnan().any():
                raise FloatingPointError
            return hidden + self.number, residual

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(number) for number in range(4))

        def forward(self, hidden: Any, *, scale: float) -> Any:
            residual = torch.zeros_like(hidden)
            for layer in self.layers:
                hidden, residual = layer(hidden * scale, residual)
            return hidden.add_(1)

    decoder = Decoder()
    decoder._extension = extension
    return decoder


def worker(rank: int = 0) -> Any:
    return module_with(
        WORKER,
        _patched_forward=lambda self: None,
        get_tp_group=lambda: SimpleNamespace(rank_in_group=rank),
    )


def hooks_of(decoder: Any) -> list[Any]:
    return [hook for layer in decoder.layers for hook in layer._forward_hooks.values()]


def test_the_models_own_forward_runs_and_layers_are_kept_in_ascending_order() -> None:
    torch = pytest.importorskip("torch")
    extension = extension_for(3, 1)
    decoder = decoder_for(extension)
    expected = type(decoder).forward(decoder, torch.ones(2, 3), scale=2.0)
    with carried_out(module := worker(), SHIM.id):
        decoder.forward = MethodType(module._patched_forward, decoder)
        result = decoder(torch.ones(2, 3), scale=2.0)
    assert torch.equal(result, expected)
    ((first, last),) = extension.stored
    # 1 -> 2+0 -> 4+1 -> 10+2 -> 24+3, and the 1 that forward adds in place comes after.
    assert torch.equal(first, torch.full((2, 3), 5.0))
    assert torch.equal(last, torch.full((2, 3), 27.0))
    assert hooks_of(decoder) == []


def test_only_the_first_rank_of_a_tensor_parallel_group_captures() -> None:
    torch = pytest.importorskip("torch")
    extension = extension_for(1)
    decoder = decoder_for(extension)
    with carried_out(module := worker(rank=1), SHIM.id):
        decoder.forward = MethodType(module._patched_forward, decoder)
        result = decoder(torch.ones(2, 3), scale=2.0)
    assert torch.equal(result, torch.full((2, 3), 28.0))
    assert extension.stored == []


def test_a_step_that_fails_leaves_no_hook_and_stores_nothing() -> None:
    torch = pytest.importorskip("torch")
    extension = extension_for(1, 2)
    decoder = decoder_for(extension)
    with carried_out(module := worker(), SHIM.id):
        decoder.forward = MethodType(module._patched_forward, decoder)
        with pytest.raises(FloatingPointError):
            decoder(torch.full((2, 3), torch.nan), scale=1.0)
    assert hooks_of(decoder) == []
    assert extension.stored == []
