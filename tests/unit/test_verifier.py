"""What is read of a checkpoint, and which layers, lengths and dtypes it allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi.verifier import Verifier, read_verifier

TEXT = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 100}


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def verifier(folder: Path, **text: Any) -> Verifier:
    return read_verifier(checkpoint(folder, {**TEXT, **text}))


def test_a_wrapped_text_config_is_what_counts(tmp_path: Path) -> None:
    config = {"text_config": TEXT, "dtype": "bfloat16", "hidden_size": 999}
    found = read_verifier(checkpoint(tmp_path, config))
    assert (found.num_hidden_layers, found.hidden_size, found.vocab_size) == (8, 16, 100)
    assert found.dtype == "bfloat16"


def test_default_layers_are_those_of_speculators(tmp_path: Path) -> None:
    assert verifier(tmp_path, num_hidden_layers=61).check_layers(None) == (2, 30, 58, 60)


@pytest.mark.parametrize("layers", range(1, 7))
def test_default_layers_that_collide_are_refused_with_the_option_to_use(
    tmp_path: Path, layers: int
) -> None:
    with pytest.raises(InputError, match="--layers"):
        verifier(tmp_path, num_hidden_layers=layers).check_layers(None)


def test_layers_keep_the_order_asked_for(tmp_path: Path) -> None:
    assert verifier(tmp_path).check_layers([7, 4, 2]) == (7, 4, 2)


@pytest.mark.parametrize(
    ("asked", "fault"), [([2, 8], "out of range"), ([-1], "out of range"), ([2, 2], "repeated")]
)
def test_layers_outside_the_model_or_repeated_are_refused(
    tmp_path: Path, asked: list[int], fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        verifier(tmp_path).check_layers(asked)


@pytest.mark.parametrize(
    ("asked", "own", "scale", "refused"),
    [
        ("float16", "bfloat16", 2.8, True),
        ("auto", "float16", 2.8, True),
        ("bfloat16", "float16", 2.8, False),
        ("float16", "bfloat16", 1.0, False),
    ],
)
def test_float16_is_refused_where_vllm_rescales_the_states(
    tmp_path: Path, asked: str, own: str, scale: float, refused: bool
) -> None:
    found = verifier(tmp_path, dtype=own, routed_scaling_factor=scale)
    if refused:
        with pytest.raises(InputError, match="float16"):
            found.check_dtype(asked)
    else:
        found.check_dtype(asked)


def test_a_length_beyond_the_positions_is_refused_unless_they_are_scaled(tmp_path: Path) -> None:
    plain = verifier(tmp_path, max_position_embeddings=64)
    plain.check_max_model_len(64)
    with pytest.raises(InputError, match="64 positions"):
        plain.check_max_model_len(65)
    scaling = {"type": "yarn", "factor": 2.0}
    verifier(tmp_path, max_position_embeddings=64, rope_scaling=scaling).check_max_model_len(65)


@pytest.mark.parametrize("value", [0, -1, True, "8", None])
def test_a_config_without_usable_numbers_is_no_checkpoint(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match="num_hidden_layers"):
        verifier(tmp_path, num_hidden_layers=value)


def test_a_folder_without_weights_is_no_checkpoint(tmp_path: Path) -> None:
    (checkpoint(tmp_path, TEXT) / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        read_verifier(tmp_path)
