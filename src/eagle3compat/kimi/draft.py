"""The draft's own sizes, chosen from its verifier's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.verifier import read_config
from eagle3compat.verifier_parts import text_part

HEAD_SIZES = (32, 64, 128, 256)
"""Sizes of attention heads that every attention backend of vLLM takes."""
ROPE_THETA = 10_000.0


def draft_layer_sizes(model: Path, num_layers: int) -> dict[str, Any]:
    """The fields of the draft's decoder layers, a llama's, for one verifier.

    Of a verifier with multi-head latent attention neither ``head_dim`` (its rotary part alone) nor
    the number of key and value heads says anything about a llama: heads are then of the smallest
    usual size that is no smaller than hidden size over heads, and as many as fill the hidden size.
    The rotary base is the verifier's; its scaling is not taken over.

    Args:
        model: folder of the verifier's checkpoint.
        num_layers: decoder layers of the draft.

    Returns:
        Arguments of a ``LlamaConfig``.

    Raises:
        InputError: a size is missing in the verifier's config.
    """
    text = text_part(read_config(model))
    try:
        sizes = {name: text[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
        heads = _heads(text)
    except KeyError as error:
        raise InputError(f"--model: {model / 'config.json'} has no {error.args[0]}") from error
    return {
        **sizes,
        **heads,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(text),
        "max_position_embeddings": text.get("max_position_embeddings") or 2048,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": text.get("bos_token_id"),
        "eos_token_id": text.get("eos_token_id"),
        "pad_token_id": text.get("pad_token_id"),
    }


def _heads(text: Any) -> dict[str, int]:
    hidden_size, heads = text["hidden_size"], text["num_attention_heads"]
    if text.get("kv_lora_rank") is None and text.get("head_dim") is not None:
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "head_dim": text["head_dim"],
        }
    wanted = hidden_size // heads
    fitting = [size for size in HEAD_SIZES if size >= wanted and hidden_size % size == 0]
    size = fitting[0] if fitting else wanted
    return {
        "num_attention_heads": hidden_size // size,
        "num_key_value_heads": hidden_size // size,
        "head_dim": size,
    }


def _rope_theta(text: Any) -> float:
    parameters = text.get("rope_parameters") or {}
    return float(text.get("rope_theta") or parameters.get("rope_theta") or ROPE_THETA)
