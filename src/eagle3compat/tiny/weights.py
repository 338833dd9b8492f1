"""The tensors of the tiny Kimi-K2.5, drawn so that its hidden states can be compared.

Random weights make a poor yardstick when rounding can change which experts a token goes to: one
flip, and two right implementations differ by tenths. So the residual stream keeps its first
`ROUTING_GROUPS` coordinates for routing. The embedding sets exactly one of them, no layer writes
to them, and a router reads nothing else: it gives each group its own order of the experts, with
wide gaps between neighbours. Tokens still spread over all experts, differently in every layer, and
neither float32 nor bfloat16 rounding moves one. Attention is kept gentle for the same reason.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

from eagle3compat.tiny.configuration import VISION, TextSizes, Variant, text_sizes
from eagle3compat.tiny.safetensors_file import Tensor, bfloat16

LANGUAGE_MODEL_PREFIX = "language_model."

ROUTING_GROUPS = 16
ROUTING_VALUE = 4.0
ROUTER_STEP = 0.5
EXPERT_BIAS = 0.01

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
    text = dict(_language_model(text_sizes(variant), draw))
    if variant.text_only:
        return text
    weights = {LANGUAGE_MODEL_PREFIX + name: tensor for name, tensor in text.items()}
    weights.update(_vision_tower(draw))
    weights.update(_projector(text_sizes(variant).hidden_size, draw))
    return weights


class Draw:
    """Random arrays that are the same for a seed and a name on every machine and NumPy version.

    NumPy promises the raw stream of a bit generator, not what `Generator` makes of it. The sum of
    the four 16-bit parts of each word is an exact integer that is nearly normally distributed;
    one multiplication brings it to scale.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def words(self, name: str, count: int) -> Any:
        """`count` raw words, a uint64 array."""
        import numpy as np

        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(count)

    def normal(self, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        """Values round zero with a standard deviation, a float64 array of the shape."""
        import numpy as np

        words = self.words(name, math.prod(shape)).reshape(shape)
        parts = [(words >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
        total = sum(part.astype(np.int64) for part in parts)
        return (total - 2 * 0xFFFF) * (deviation / math.sqrt((2**32 - 1) / 3))

    def order(self, name: str, count: int) -> Any:
        """A permutation of 0 … count-1, an int64 array."""
        return self.words(name, count).argsort(kind="stable")


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
    import numpy as np

    values = draw.normal(name, (sizes.vocab_size, sizes.hidden_size), 1.0)
    tokens = np.arange(sizes.vocab_size)
    values[:, :ROUTING_GROUPS] = 0.0
    values[tokens, tokens % ROUTING_GROUPS] = ROUTING_VALUE
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
    yield _router(f"{prefix}gate.weight", sizes, draw)
    bias = draw.normal(f"{prefix}bias", (sizes.n_routed_experts,), EXPERT_BIAS).astype("<f4")
    yield f"{prefix}gate.e_score_correction_bias", Tensor("F32", bias.shape, bias.tobytes())
    for expert in range(sizes.n_routed_experts):
        yield from _mlp(f"{prefix}experts.{expert}.", sizes.moe_intermediate_size, sizes, draw)
    yield from _mlp(f"{prefix}shared_experts.", sizes.moe_intermediate_size, sizes, draw)


def _router(name: str, sizes: TextSizes, draw: Draw) -> tuple[str, Tensor]:
    """Ranks the experts for each group: the layer's own order, one step further for the next group.

    Zero lies half-way between the last expert that is chosen and the first that is not.
    """
    import numpy as np

    experts = sizes.n_routed_experts
    rank = (draw.order(name, experts)[:, None] + np.arange(ROUTING_GROUPS)) % experts
    values = np.zeros((experts, sizes.hidden_size))
    values[:, :ROUTING_GROUPS] = ROUTER_STEP * (sizes.num_experts_per_tok - 0.5 - rank)
    return name, bfloat16(values)


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
