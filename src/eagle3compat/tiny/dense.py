"""Tiny dense models beside the tiny Kimi-K2.5: what works must not be Kimi's alone.

A Qwen3 (grouped queries, a norm of queries and keys) and a Gemma 3 text model (layers of sliding
windows between layers of full attention, scaled embeddings, four norms a layer).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from eagle3compat.tiny.checkpoint import TOKENIZER_CODE
from eagle3compat.tiny.configuration import (
    CONTEXT_LENGTH,
    generation_configuration,
    tokenizer_configuration,
)
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.safetensors_file import Tensor, bfloat16, write_safetensors
from eagle3compat.tiny.vocabulary import VOCABULARY_SIZE, tiktoken_ranks

Kind = Literal["qwen3", "gemma3"]

HIDDEN, INNER, HEAD = 128, 256, 64
HEADS, KEY_VALUE_HEADS, LAYERS = 4, 2, 6
SLIDING_WINDOW = 32
"""Shorter than the prompts of the suite: a window that is ignored shows."""


def write_tiny_dense(directory: Path, kind: Kind, *, seed: int = 0) -> None:
    """Write a random dense checkpoint of 6 layers.

    Args:
        directory: a folder that does not exist yet.
        kind: which model.
        seed: which random weights.
    """
    directory.mkdir(parents=True)
    _write_json(directory / "config.json", configuration(kind))
    _write_json(directory / "generation_config.json", generation_configuration())
    _write_json(directory / "tokenizer_config.json", tokenizer_configuration())
    (directory / "tiktoken.model").write_text(tiktoken_ranks(), encoding="ascii")
    for name in TOKENIZER_CODE:
        source = resources.files("eagle3compat.tiny") / "remote" / name
        (directory / name).write_bytes(source.read_bytes())
    write_safetensors(directory / "model.safetensors", dict(_weights(kind, Draw(seed))))


def configuration(kind: Kind) -> dict[str, Any]:
    """The content of ``config.json``."""
    common: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        **generation_configuration(),
    }
    if kind == "qwen3":
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **common,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        }
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **common,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": [
            "full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(LAYERS)
        ],
        "tie_word_embeddings": True,
    }


def _weights(kind: Kind, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    # Gemma's norms multiply by one more than their weight.
    base = 1.0 if kind == "qwen3" else 0.0
    # Gemma scales embeddings by the root of the width.
    embedding = 1.0 if kind == "qwen3" else 1.0 / math.sqrt(HIDDEN)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KEY_VALUE_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KEY_VALUE_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }

    def matrix(name: str, shape: tuple[int, ...], deviation: float) -> tuple[str, Tensor]:
        return name, bfloat16(draw.normal(name, shape, deviation))

    def norm(name: str, width: int) -> tuple[str, Tensor]:
        return name, bfloat16(base + draw.normal(name, (width,), 0.1))

    yield matrix("model.embed_tokens.weight", (VOCABULARY_SIZE, HIDDEN), embedding)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in norms:
            yield norm(f"{prefix}{name}.weight", HIDDEN)
        yield norm(f"{prefix}self_attn.q_norm.weight", HEAD)
        yield norm(f"{prefix}self_attn.k_norm.weight", HEAD)
        for name, shape in shapes.items():
            yield matrix(f"{prefix}{name}.weight", shape, 1.0 / math.sqrt(shape[1]))
    yield norm("model.norm.weight", HIDDEN)
    if kind == "qwen3":
        yield matrix("lm_head.weight", (VOCABULARY_SIZE, HIDDEN), 0.2)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
