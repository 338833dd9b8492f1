"""The float32 reference: what it returns, what it refuses, and how far off is measured."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.reference import (
    Comparison,
    ReferenceModel,
    compare,
    reference_hidden_states,
    reference_logits,
    relative_error,
)
from eagle3compat.tiny import Variant, write_tiny_kimi

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEQUENCES = [[5, 300, 17, 256, 90, 341, 2], [7], list(range(60))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "tiny"
    write_tiny_kimi(folder)
    return folder


@pytest.fixture(scope="module")
def model(tiny: Path) -> ReferenceModel:
    return ReferenceModel.load(tiny)


def test_states_are_float32_of_the_layers_asked_in_their_order(model: ReferenceModel) -> None:
    up = model.hidden_states(SEQUENCES, [0, 3, 7])
    down = model.hidden_states(SEQUENCES, [7, 3, 0])
    for sequence, rising, falling in zip(SEQUENCES, up, down, strict=True):
        assert [tuple(state.shape) for state in rising] == [(len(sequence), 128)] * 3
        assert {state.dtype for state in rising} == {torch.float32}
        for one, other in zip(rising, reversed(falling), strict=True):
            assert torch.equal(one, other)


def test_a_layer_may_be_asked_twice(model: ReferenceModel) -> None:
    first, second = model.hidden_states([[1, 2]], [4, 4])[0]
    assert torch.equal(first, second)


def test_the_state_after_a_layer_is_what_the_next_layer_gets(model: ReferenceModel) -> None:
    sequence = SEQUENCES[0]
    states = model.hidden_states([sequence], range(8))[0]
    with torch.no_grad():
        output = model.model(torch.tensor([sequence]), output_hidden_states=True)
    for layer in range(7):
        assert torch.equal(states[layer], output.hidden_states[layer + 1][0])


def test_the_last_state_precedes_the_final_norm(model: ReferenceModel) -> None:
    last = model.hidden_states(SEQUENCES, [7])
    logits = model.logits(SEQUENCES)
    inner: Any = model.model
    for (state,), expected in zip(last, logits, strict=True):
        with torch.no_grad():
            assert torch.allclose(inner.lm_head(inner.model.norm(state)), expected, atol=1e-4)
            assert not torch.allclose(inner.lm_head(state), expected, atol=1.0)


def test_states_depend_on_order_and_on_what_came_before(model: ReferenceModel) -> None:
    one, other = (model.hidden_states([ids], [7])[0][0] for ids in ([9, 4, 1], [4, 9, 1]))
    assert relative_error(one[-1:], other[-1:]) > 0.01


def test_the_functions_agree_with_the_loaded_model(tiny: Path, model: ReferenceModel) -> None:
    states = reference_hidden_states(tiny, SEQUENCES, [2])
    assert compare(states, model.hidden_states(SEQUENCES, [2]), [2]).worst == 0.0
    logits = reference_logits(tiny, SEQUENCES)
    assert [tuple(values.shape) for values in logits] == [(7, 384), (1, 384), (60, 384)]


@pytest.mark.parametrize("yarn", [False, True])
def test_the_wrapper_and_the_plain_checkpoint_give_the_same_states(
    tmp_path: Path, yarn: bool
) -> None:
    write_tiny_kimi(tmp_path / "whole", variant=Variant(yarn=yarn))
    write_tiny_kimi(tmp_path / "text", variant=Variant(yarn=yarn, text_only=True))
    whole = reference_hidden_states(tmp_path / "whole", SEQUENCES, range(8))
    text = reference_hidden_states(tmp_path / "text", SEQUENCES, range(8))
    assert compare(whole, text, range(8)).worst == 0.0


def test_any_decoder_that_transformers_knows_can_be_the_reference(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    torch.manual_seed(0)
    qwen = transformers.Qwen3ForCausalLM(config).eval()
    qwen.save_pretrained(tmp_path)
    states = reference_hidden_states(tmp_path, [[1, 2, 3]], [0, 2])[0]
    with torch.no_grad():
        output = qwen(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
        assert relative_error(states[0], output.hidden_states[1][0]) < 1e-5
        assert relative_error(qwen.model.norm(states[1]), output.hidden_states[-1][0]) < 1e-5


@pytest.mark.parametrize("layer_id", [-1, 8])
def test_a_layer_out_of_range_is_refused(model: ReferenceModel, layer_id: int) -> None:
    with pytest.raises(InputError, match=f"layer id {layer_id}: expected 0 to 7"):
        model.hidden_states(SEQUENCES, [0, layer_id])


@pytest.mark.parametrize("token_id", [-1, 384])
def test_a_token_outside_the_vocabulary_is_refused(model: ReferenceModel, token_id: int) -> None:
    with pytest.raises(InputError, match=f"token id {token_id}: expected 0 to 383"):
        model.hidden_states([[0, token_id]], [0])


def test_an_empty_sequence_is_refused(model: ReferenceModel) -> None:
    with pytest.raises(InputError, match="at least one token"):
        model.logits([[]])


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Give the folder of a checkpoint"):
        reference_hidden_states(tmp_path, [[1]], [0])


def _edited(tiny: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(tiny, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["text_config"].update(changes)
    path.write_text(json.dumps(config))
    return target


def test_another_language_model_in_the_wrapper_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = _edited(tiny, tmp_path / "model", model_type="llama")
    with pytest.raises(InputError, match="found 'llama'"):
        ReferenceModel.load(folder)


def test_quantized_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = _edited(tiny, tmp_path / "model", quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match="quantization_config"):
        ReferenceModel.load(folder)


def test_a_missing_shard_is_refused_not_filled_with_random_weights(
    tiny: Path, tmp_path: Path
) -> None:
    folder = _edited(tiny, tmp_path / "model")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="missing or of another shape"):
        ReferenceModel.load(folder)


def test_weights_of_another_shape_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = _edited(tiny, tmp_path / "model", vocab_size=400)
    with pytest.raises(InputError, match=str(folder)):
        ReferenceModel.load(folder)


def test_a_damaged_shard_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = _edited(tiny, tmp_path / "model")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\x10")
    with pytest.raises(InputError, match="damaged"):
        ReferenceModel.load(folder)


def test_the_relative_error_is_that_of_the_worst_row() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    found = torch.tensor([[3.0, 4.5], [0.0, 12.0]])
    assert relative_error(found, expected) == pytest.approx(0.2)
    assert relative_error(expected, expected) == 0.0


def test_the_relative_error_takes_any_floating_dtype() -> None:
    expected = torch.full((2, 4), 1.0)
    assert relative_error(expected.to(torch.bfloat16), expected) == 0.0


def test_rows_of_zeros_are_met_by_zeros_alone() -> None:
    zeros = torch.zeros(2, 3)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros + 1e-9, zeros) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_infinitely_far(value: float) -> None:
    expected = torch.ones(2, 3)
    found = expected.clone()
    found[1, 2] = value
    assert relative_error(found, expected) == math.inf


def test_another_number_of_rows_is_infinitely_far() -> None:
    assert relative_error(torch.ones(2, 3), torch.ones(3, 3)) == math.inf


def test_a_comparison_holds_samples_by_layers() -> None:
    expected = [[torch.ones(2, 4), torch.ones(2, 4)], [torch.ones(5, 4), torch.ones(5, 4)]]
    found = [[state.clone() for state in sample] for sample in expected]
    found[1][0] *= 1.5
    comparison = compare(found, expected, [3, 1])
    assert comparison == Comparison((3, 1), (2, 5), ((0.0, 0.0), (0.5, 0.0)))
    assert comparison.worst == 0.5
    assert comparison.agrees(0.5)
    assert not comparison.agrees()


def test_nothing_compared_does_not_agree() -> None:
    assert not compare([], [], [0]).agrees()


@pytest.mark.parametrize("samples", [0, 2])
def test_a_missing_or_surplus_sample_is_refused(samples: int) -> None:
    state = torch.ones(1, 2)
    with pytest.raises(InputError, match="as many samples"):
        compare([[state]] * samples, [[state]], [0])


def test_a_missing_layer_is_refused() -> None:
    state = torch.ones(1, 2)
    with pytest.raises(InputError, match="as many layers"):
        compare([[state]], [[state, state]], [0, 1])
