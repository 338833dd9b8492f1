"""Tiny dense models: the same for the same seed, and what their configurations promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.tiny.dense import SLIDING_WINDOW, Kind, configuration, write_tiny_dense

pytest.importorskip("numpy")
KINDS: tuple[Kind, ...] = ("qwen3", "gemma3")
both_kinds = pytest.mark.parametrize("kind", KINDS)


def shapes_of(file: Path) -> dict[str, list[int]]:
    content = file.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


@both_kinds
def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path, kind: Kind) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny_dense(tmp_path / name, kind, seed=seed)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


@both_kinds
def test_every_layer_has_its_tensors(tmp_path: Path, kind: Kind) -> None:
    write_tiny_dense(tmp_path / "model", kind)
    shapes = shapes_of(tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    per_layer = {"qwen3": 11, "gemma3": 13}[kind]
    layers = [name for name in shapes if name.startswith("model.layers.")]
    assert len(layers) == per_layer * config["num_hidden_layers"]
    assert ("lm_head.weight" in shapes) != config["tie_word_embeddings"]
    queries = config["num_attention_heads"] * config["head_dim"]
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [queries, config["hidden_size"]]


def test_gemma_has_layers_of_both_kinds_and_a_window_shorter_than_the_prompts() -> None:
    config = configuration("gemma3")
    assert set(config["layer_types"]) == {"full_attention", "sliding_attention"}
    assert config["sliding_window"] == SLIDING_WINDOW < 100


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        write_tiny_dense(tmp_path, "qwen3")
