"""What a draft is made like, for its verifier; and how layers are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3compat.errors import InputError, Refusal
from eagle3compat.kimi.draft import HEAD_SIZES, draft_layer_sizes
from eagle3compat.verifier_parts import default_layers, served_layer_ids, stored_name, text_part

KIMI = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0},
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}
QWEN = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
}


def sizes(folder: Path, config: dict[str, Any], layers: int = 1) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return draft_layer_sizes(folder, layers)


def test_kimis_rotary_part_is_no_head_size(tmp_path: Path) -> None:
    made = sizes(tmp_path, {"text_config": KIMI}, layers=2)
    heads = (made["head_dim"], made["num_attention_heads"], made["num_key_value_heads"])
    assert heads == (128, 56, 56)
    assert made["rope_theta"] == 50000.0
    assert "rope_scaling" not in made
    assert (made["num_hidden_layers"], made["rms_norm_eps"]) == (2, 1e-5)


def test_an_ordinary_verifiers_heads_are_taken_over(tmp_path: Path) -> None:
    made = sizes(tmp_path, QWEN)
    heads = (made["head_dim"], made["num_attention_heads"], made["num_key_value_heads"])
    assert heads == (128, 32, 8)
    assert made["rope_theta"] == 1000000.0


def test_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    without = {key: value for key, value in QWEN.items() if key != "intermediate_size"}
    with pytest.raises(InputError, match=r"config\.json has no intermediate_size"):
        sizes(tmp_path, without)


@given(hidden=st.integers(1, 256).map(lambda count: 32 * count), heads=st.integers(1, 64))
def test_heads_fill_the_hidden_size_wherever_a_usual_size_does(hidden: int, heads: int) -> None:
    from eagle3compat.kimi.draft import _heads

    made = _heads({"hidden_size": hidden, "num_attention_heads": heads, "kv_lora_rank": 64})
    fits = [size for size in HEAD_SIZES if size >= hidden // heads and hidden % size == 0]
    if fits:
        assert made["head_dim"] * made["num_attention_heads"] == hidden
        assert made["head_dim"] == min(fits)


def test_vllm_counts_inputs_and_by_rising_layer() -> None:
    assert served_layer_ids([2, 4, 5]) == [3, 5, 6]
    assert served_layer_ids([5, 2, 4]) == [3, 5, 6]
    assert served_layer_ids(default_layers(61)) == [3, 31, 59]


def test_the_text_part_of_a_wrapper_is_found() -> None:
    assert text_part({"text_config": KIMI, "hidden_size": 1}) == KIMI
    assert text_part(QWEN) == QWEN
    assert text_part(QWEN | {"text_config": None}) == QWEN | {"text_config": None}


NAME = "model.norm.weight"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([NAME], NAME),
        ([f"language_model.{NAME}", "vision_tower.norm.weight"], f"language_model.{NAME}"),
        ([NAME, f"other.{NAME}"], NAME),
        (["my" + NAME], None),
        ([], None),
    ],
)
def test_a_tensor_is_found_below_a_prefix(names: list[str], expected: str | None) -> None:
    assert stored_name(names, NAME, "checkpoint") == expected


def test_two_tensors_that_could_be_meant_are_refused() -> None:
    with pytest.raises(Refusal, match=r"a\.model\.norm\.weight, b\.model\.norm\.weight"):
        stored_name([f"b.{NAME}", f"a.{NAME}"], NAME, "checkpoint")
