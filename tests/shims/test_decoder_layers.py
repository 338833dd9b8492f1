"""decoder-layers: the text model's layers, below whatever wraps them."""

from __future__ import annotations

from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probing import SET_UP_BY_HAND, WORKER, Builds
from standins import carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import Status
from eagle3compat.shims.decoder_layers import SHIM, find_decoder


def test_needed_where_only_supporting_models_are_accepted(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert finding.conditional
    line = installed.text(WORKER).splitlines()[(finding.line or 0) - 1]
    assert "supports_eagle3(model)" in line


def test_not_needed_where_the_consumer_looks_below_wrappers(later: Builds) -> None:
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*SET_UP_BY_HAND),
        installed.without(WORKER),
        installed.without_text(WORKER),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def decoder_of(layers: int) -> SimpleNamespace:
    return SimpleNamespace(layers=list(range(layers)))


class Wrapper:
    """A model that tells its text model, as multimodal ones do."""

    def __init__(self, inner: Any, **parts: Any) -> None:
        self._inner = inner
        vars(self).update(parts)

    def get_language_model(self) -> Any:
        return self._inner


@given(path=st.lists(st.sampled_from(["model", "language_model", "method"]), max_size=6))
def test_the_decoder_is_found_below_any_wrapping(path: list[str]) -> None:
    decoder = decoder_of(4)
    model: Any = decoder
    for step in path:
        model = Wrapper(model) if step == "method" else SimpleNamespace(**{step: model})
    assert find_decoder(model, 4) is decoder


def test_layers_of_another_number_are_passed_over() -> None:
    decoder = decoder_of(4)
    vision_first = SimpleNamespace(layers=[1, 2], model=decoder)
    assert find_decoder(vision_first, 4) is decoder


def test_the_method_goes_before_the_attributes() -> None:
    decoder = decoder_of(4)
    assert find_decoder(Wrapper(SimpleNamespace(model=decoder), model=decoder_of(4)), 4) is decoder


def test_a_text_model_that_names_itself_is_looked_into() -> None:
    model = SimpleNamespace(model=decoder_of(4))
    model.get_language_model = lambda: model
    assert find_decoder(model, 4) is model.model


def test_an_attribute_without_a_length_is_no_list_of_layers() -> None:
    model = SimpleNamespace(layers=4, model=decoder_of(4))
    assert find_decoder(model, 4) is model.model


def test_a_model_without_such_layers_is_refused_with_the_way_that_was_searched() -> None:
    model = Wrapper(SimpleNamespace(model=decoder_of(3)))
    with pytest.raises(Refusal, match=r"4 decoder layers below Wrapper.*Wrapper -> Simple"):
        find_decoder(model, 4)


def test_a_circle_is_refused_too() -> None:
    outer, inner = SimpleNamespace(), SimpleNamespace()
    outer.model, inner.model = inner, outer
    with pytest.raises(Refusal, match="4 decoder layers"):
        find_decoder(outer, 4)


class Extension:
    def __init__(self, model: Any, layers: int) -> None:
        text_config = SimpleNamespace(num_hidden_layers=layers)
        config = SimpleNamespace(hf_text_config=text_config)
        self.model_runner = SimpleNamespace(model=model, model_config=config)

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        raise AssertionError("the consumer's own was called")


def patched_forward(self: Any) -> Any:
    return self


@pytest.fixture
def module() -> ModuleType:
    return module_with(
        WORKER, HiddenStatesWorkerExtension=Extension, _patched_forward=patched_forward
    )


def test_capture_is_set_up_on_the_decoder(module: ModuleType) -> None:
    decoder = decoder_of(4)
    with carried_out(module, SHIM.id):
        extension = module.HiddenStatesWorkerExtension(Wrapper(decoder), 4)
        extension._setup_hidden_states_capture([3, 1])
    assert (extension._layer_ids, extension._captured_states) == (frozenset({1, 3}), None)
    assert decoder._extension is extension
    assert isinstance(decoder.forward, MethodType)
    assert decoder.forward() is decoder


def test_the_forward_is_looked_up_when_capture_is_set_up(module: ModuleType) -> None:
    """Another shim rebinds it after this one."""
    decoder = decoder_of(4)
    with carried_out(module, SHIM.id, "model-forward"):
        extension = module.HiddenStatesWorkerExtension(decoder, 4)
        extension._setup_hidden_states_capture([1])
        assert decoder.forward.__func__ is module._patched_forward
        assert module._patched_forward is not patched_forward
