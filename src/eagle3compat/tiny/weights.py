"""The tensors of the tiny Kimi-K2.5, drawn so that its hidden states can be compared.

Rounding must move no token to another expert (`routing`). Attention is kept gentle for the same
reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from eagle3compat.tiny.configuration import VISION, TextSizes, Variant, text_sizes
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.learnable_weights import learnable_language_model
from eagle3compat.tiny.routing import ROUTING_GROUPS, router, set_routing_group
from eagle3compat.tiny.safetensors_file import Tensor, bfloat16

LANGUAGE_MODEL_PREFIX = "language_model."

# Standard deviations of queries, and of keys and values. With larger queries attention picks single
# tokens and multiplies rounding errors: three times as large, an error in the embedding grows a
# hundredfold over 8 layers and 1000 tokens, instead of sixfold.
QUERY = 0.5
KEY_VALUE = 1.6


def draw_weights(variant: Variant, seed: int) -> dict[str, Tensor]:
    """Draws every tensor of a checkpoint.

    A tensor's values depend on the seed, its name and its shape alone: variants share what they
    have in common, whatever the order of drawing.

    Args:
        variant: which checkpoint.
        seed: any integer.

    Returns:
        The tensors by their checkpoint names, in the order of the layers: bfloat16, the routers'
        correction biases float32.
    """
    draw = Draw(seed)
    sizes = text_sizes(variant)
    text = dict(
        learnable_language_model(sizes, draw) if variant.learnable else _language_model(sizes, draw)
    )
    if variant.text_only:
        return text
    weights = {LANGUAGE_MODEL_PREFIX + name: tensor for name, tensor in text.items()}
    weights.update(_vision_tower(draw))
    weights.update(_projector(sizes.hidden_size, draw))
    return weights


def _language_model(sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    yield _embedding("model.embed_tokens.weight", sizes, draw)
    for layer in range(sizes.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield _norm(f"{prefix}input_layernorm.weight", sizes.hidden_size, draw)
        yield from _attention(f"{prefix}self_attn.", sizes, draw)
        yield _norm(f"{prefix}post_attention_layernorm.weight", sizes.hidden_size, draw)
        if layer < sizes.first_k_dense_replace:
            yield from _mlp(f"{prefix}mlp.", sizes.intermediate_size, sizes, draw)
        else:
            yield from _experts(f"{prefix}mlp.", sizes, draw)
    yield _norm("model.norm.weight", sizes.hidden_size, draw)
    yield _matrix("lm_head.weight", (sizes.vocab_size, sizes.hidden_size), draw, 0.2)


def _embedding(name: str, sizes: TextSizes, draw: Draw) -> tuple[str, Tensor]:
    values = draw.normal(name, (sizes.vocab_size, sizes.hidden_size), 1.0)
    set_routing_group(values)
    return name, bfloat16(values)


def _attention(prefix: str, sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    query_rank, latent, rotary = sizes.q_lora_rank, sizes.kv_lora_rank, sizes.qk_rope_head_dim
    query = heads * (sizes.qk_nope_head_dim + rotary)
    key_value = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)

    yield _matrix(f"{prefix}q_a_proj.weight", (query_rank, hidden), draw, 0.1)
    yield _norm(f"{prefix}q_a_layernorm.weight", query_rank, draw)
    yield _matrix(
        f"{prefix}q_b_proj.weight", (query, query_rank), draw, QUERY / math.sqrt(query_rank)
    )
    yield _matrix(f"{prefix}kv_a_proj_with_mqa.weight", (latent + rotary, hidden), draw, 0.1)
    yield _norm(f"{prefix}kv_a_layernorm.weight", latent, draw)
    yield _matrix(
        f"{prefix}kv_b_proj.weight", (key_value, latent), draw, KEY_VALUE / math.sqrt(latent)
    )
    yield _residual(f"{prefix}o_proj.weight", (hidden, heads * sizes.v_head_dim), draw)


def _experts(prefix: str, sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    yield from router(f"{prefix}", sizes, draw)
    for expert in range(sizes.n_routed_experts):
        yield from _mlp(f"{prefix}experts.{expert}.", sizes.moe_intermediate_size, sizes, draw)
    yield from _mlp(f"{prefix}shared_experts.", sizes.moe_intermediate_size, sizes, draw)


def _mlp(prefix: str, width: int, sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    yield _matrix(f"{prefix}gate_proj.weight", (width, sizes.hidden_size), draw, 0.1)
    yield _matrix(f"{prefix}up_proj.weight", (width, sizes.hidden_size), draw, 0.1)
    yield _residual(f"{prefix}down_proj.weight", (sizes.hidden_size, width), draw)


def _vision_tower(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    width, inner, patch = VISION.hidden_size, VISION.intermediate_size, VISION.patch_size
    grid = VISION.position_grid
    yield from _linear("vision_tower.patch_embed.proj", (width, 3, patch, patch), draw)
    yield _matrix("vision_tower.patch_embed.pos_emb.weight", (grid, grid, width), draw, 0.05)
    for block in range(VISION.num_hidden_layers):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield from _layer_norm(f"{prefix}norm0", width, draw)
        yield from _linear(f"{prefix}wqkv", (3 * width, width), draw)
        yield from _linear(f"{prefix}wo", (width, width), draw)
        yield from _layer_norm(f"{prefix}norm1", width, draw)
        yield from _linear(f"{prefix}mlp.fc0", (inner, width), draw)
        yield from _linear(f"{prefix}mlp.fc1", (width, inner), draw)
    yield from _layer_norm("vision_tower.encoder.final_layernorm", width, draw)


def _projector(text_hidden_size: int, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    merged = VISION.hidden_size * VISION.merge**2
    yield from _layer_norm("mm_projector.pre_norm", VISION.hidden_size, draw)
    yield from _linear("mm_projector.proj.0", (merged, merged), draw)
    yield from _linear("mm_projector.proj.2", (text_hidden_size, merged), draw)


def _matrix(name: str, shape: tuple[int, ...], draw: Draw, deviation: float) -> tuple[str, Tensor]:
    return name, bfloat16(draw.normal(name, shape, deviation))


def _residual(name: str, shape: tuple[int, int], draw: Draw) -> tuple[str, Tensor]:
    """A matrix whose output is added to the residual stream: it leaves the routing alone."""
    values = draw.normal(name, shape, 0.1)
    values[:ROUTING_GROUPS] = 0.0
    return name, bfloat16(values)


def _norm(name: str, width: int, draw: Draw) -> tuple[str, Tensor]:
    return name, bfloat16(1.0 + draw.normal(name, (width,), 0.1))


def _linear(name: str, shape: tuple[int, ...], draw: Draw) -> Iterator[tuple[str, Tensor]]:
    yield _matrix(f"{name}.weight", shape, draw, 0.05)
    yield _matrix(f"{name}.bias", shape[:1], draw, 0.05)


def _layer_norm(name: str, width: int, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    yield _norm(f"{name}.weight", width, draw)
    yield _matrix(f"{name}.bias", (width,), draw, 0.05)
