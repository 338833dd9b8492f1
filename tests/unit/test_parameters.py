"""Parameters and bytes, counted from config.json, are those of real checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_kimi_files import read_json, read_shard

from eagle3compat.kimi.parameters import Weights, count_weights
from eagle3compat.tiny import Variant, write_tiny_kimi
from eagle3compat.tiny.dense import write_tiny_dense

KIMI = json.loads(
    (Path(__file__).parent.parent / "data" / "configs" / "kimi-k2.5.json").read_text()
)


def counted(config: dict[str, Any]) -> Weights:
    weights = count_weights(config)
    assert weights is not None
    return weights


def stored(folder: Path) -> tuple[int, int]:
    """Parameters and bytes of the tensors in a checkpoint's files."""
    parameters = size = 0
    for path in folder.glob("*.safetensors"):
        header, data = read_shard(path)
        parameters += sum(math.prod(tensor["shape"]) for tensor in header.values())
        size += len(data)
    return parameters, size


@pytest.mark.parametrize(
    "variant",
    [Variant(), Variant(mla_gpu=True), Variant(text_only=True), Variant(learnable=True)],
    ids=str,
)
def test_the_tiny_kimis_tensors_are_counted_exactly(tmp_path: Path, variant: Variant) -> None:
    pytest.importorskip("numpy")
    write_tiny_kimi(tmp_path / "tiny", variant=variant)
    weights = counted(read_json(tmp_path / "tiny" / "config.json"))
    assert (weights.parameters, weights.bytes(2)) == stored(tmp_path / "tiny")


def test_a_tiny_qwen3s_tensors_are_counted_exactly(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    write_tiny_dense(tmp_path / "tiny", "qwen3")
    weights = counted(read_json(tmp_path / "tiny" / "config.json"))
    assert (weights.parameters, weights.bytes(2)) == stored(tmp_path / "tiny")


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_8B, 8_030_261_248), (QWEN2_7B, 7_615_616_512), (QWEN3_8B, 8_190_735_360)],
    ids=["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B"],
)
def test_published_counts_of_dense_models_are_met(config: dict[str, Any], parameters: int) -> None:
    assert counted(config).parameters == parameters


def test_kimi_has_a_trillion_parameters_and_its_int4_checkpoint_594_gigabytes() -> None:
    weights = counted(KIMI)
    # 1.03 T published for the language model, and 0.4 B of the vision tower.
    assert weights.parameters == pytest.approx(1.03e12, rel=0.005)
    assert weights.bytes(2) == pytest.approx(594e9, rel=0.005)
    assert weights.bytes(2, quantised=False) == pytest.approx(2 * weights.parameters, rel=1e-6)


def test_deepseek_v3_in_fp8_has_671_billion_parameters() -> None:
    config = {
        **KIMI["text_config"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    weights = counted(config)
    assert weights.parameters == pytest.approx(671e9, rel=0.001)
    # A byte each, 1.85 B of embedding and head in two, and a scale in four a block.
    assert weights.bytes(2) == pytest.approx(671e9 * (1 + 4 / 128**2) + 1.9e9, rel=0.002)


def test_what_is_split_and_what_is_whole_on_each_gpu_adds_up() -> None:
    weights = counted(KIMI)
    whole = {1: weights.bytes(2)}
    for gpus in (2, 4, 8, 16):
        whole[gpus] = weights.bytes(2, gpus=gpus)
        # Per GPU a part, and the same replicated rest.
        rest = (gpus * whole[gpus] - whole[1]) / (gpus - 1)
        assert rest == pytest.approx((2 * whole[2] - whole[1]) / 1, rel=1e-3)
    hidden, layers, ranks = 7168, 61, 1536 + 512 + 64
    latent = layers * (hidden * ranks + 2 * hidden + 1536 + 512) + hidden
    routers = 60 * 384 * (hidden + 2)  # a correction bias has four bytes, as two parameters
    tower = 2 * sum(
        tensor.parameters
        for tensor in weights.tensors
        if tensor.name.startswith(("vision_tower", "mm_projector"))
    )
    assert 2 * whole[2] - whole[1] == 2 * (latent + routers) + tower


def test_key_value_heads_are_repeated_where_there_are_more_gpus() -> None:
    weights = counted(LLAMA_8B)
    one_head = 2 * 32 * 128 * 4096 * 2
    assert weights.bytes(2, gpus=16) - weights.bytes(2, gpus=8) // 2 == pytest.approx(
        one_head / 2 + 2 * 65 * 4096 / 2, rel=1e-6
    )


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA_8B, "model_type": "gemma3_text"},
        {"model_type": "llama", "hidden_size": 8},
        {**KIMI, "model_type": "llava"},
        {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4}},
        {
            **LLAMA_8B,
            "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}},
        },
    ],
    ids=["other model", "half a config", "other wrapper", "other method", "no groups"],
)
def test_what_is_not_known_is_not_guessed(config: dict[str, Any]) -> None:
    assert count_weights(config) is None
