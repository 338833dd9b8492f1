"""The weights that carry out the rules of the learnable tiny Kimi-K2.5.

They are built, not trained. The residual stream is cut into coordinates with one meaning each
(`Layout`). Every token's embedding has the same length, so that norms multiply by known factors,
and what the layers compute is exact to rounding:

- layer 0's heads 0 to 2 attend to the key token of the highest rank of their class, at whatever
  distance, or to that one of a stream whose distance is right, and copy its code;
- a gated unit computes ``silu(a) * b``, and two of them ``silu(a) * b - silu(-a) * b = a * b``:
  the shared experts multiply signs that way.

What is left of attention and of the experts is random, as in the other variants. It reads and
writes coordinates that the rules do not use, so that hidden states differ from layer to layer in
more than the pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3compat.tiny.configuration import TextSizes
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.learnable import (
    BITS,
    GROUPS,
    KEY_CLASSES,
    KEY_LAYERS,
    PAGES,
    WAVES,
    TokenFeatures,
    token_features,
)
from eagle3compat.tiny.routing import ROUTING_GROUPS, router, set_routing_group
from eagle3compat.tiny.safetensors_file import Tensor, bfloat16
from eagle3compat.tiny.vocabulary import VOCABULARY_SIZE, marker_id

CONSTANT = 2.0
RANK_STEP = 0.0125
# How large a sign of a token or a page, the group and a bit of the successor stand in the residual
# stream: as large as what carries no news, so that a draft finds them quickly. The raw codes stand
# so small that no draft makes pages of its own.
SIGN, PAGE, GROUP, BIT = 4.0, 4.0, 8.0, 4.0
RAW = 1 / 512
# Standard deviations of the embedding's noise, and of what writes noise: little enough that lengths
# stay known.
NOISE, NOISE_WRITTEN = 0.25, 0.01
# Squared lengths: of an embedding, and of its part that tells keys.
EMBEDDING_LENGTH = 192.0
KEY_LENGTH = 25.0

# Nats between the attention to a key token and to the one of the next lower rank.
RANK_GAP = 12.0

# Nats between the successor and a token with one bit wrong, or of another group.
BIT_MARGIN, GROUP_MARGIN = 5.0, 8.0


@dataclass(frozen=True)
class Layout:
    """Where in the residual stream which thing stands.

    Attributes:
        constant: always `CONSTANT`.
        rank: for each class the rank of a key token.
        code: the code of a key token.
        signs: for each bit that a page tells and each group: `SIGN` in the token's group, else 0.
        next_group: the group of the successor.
        bits: the signs of the successor's bits.
        raw: for each class the code of its key token of the highest rank.
        page: the layer's page.
        key_ballast: brings the key part to its length.
        ballast: brings the embedding to its length.
        stream: 1 for a token of a stream.
        thinking: `GROUP` for ``<think>``, which ``</think>`` follows.
        noise: what no rule uses.
    """

    constant: int = ROUTING_GROUPS
    rank: int = constant + 1
    code: int = rank + KEY_CLASSES
    signs: int = code + GROUPS
    next_group: int = signs + len(KEY_LAYERS) * GROUPS
    bits: int = next_group + GROUPS
    raw: int = bits + BITS
    page: int = raw + KEY_CLASSES * GROUPS
    key_ballast: int = page + GROUPS
    ballast: int = key_ballast + 1
    stream: int = ballast + 1
    thinking: int = stream + 1
    noise: int = thinking + 1


AT = Layout()


def learnable_language_model(sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the language model, by name, in the order of the layers."""
    import numpy as np

    features = token_features(draw)
    ones = np.ones(sizes.hidden_size)
    yield "model.embed_tokens.weight", bfloat16(_embedding(features, sizes, draw))
    for layer in range(sizes.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", bfloat16(ones)
        yield from _attention(f"{prefix}self_attn.", layer, sizes, draw)
        yield f"{prefix}post_attention_layernorm.weight", bfloat16(ones)
        if layer < sizes.first_k_dense_replace:
            yield from _mlp(f"{prefix}mlp.", sizes.intermediate_size, sizes, draw)
        else:
            yield from _experts(f"{prefix}mlp.", layer, sizes, draw)
    yield "model.norm.weight", bfloat16(ones)
    yield "lm_head.weight", bfloat16(_lm_head(features, sizes))


def _embedding(features: TokenFeatures, sizes: TextSizes, draw: Draw) -> Any:
    import numpy as np

    tokens = np.arange(VOCABULARY_SIZE)
    keys = features.key_class >= 0
    values = np.zeros((VOCABULARY_SIZE, sizes.hidden_size))
    set_routing_group(values)
    values[:, AT.constant] = CONSTANT
    values[keys, AT.rank + features.key_class[keys]] = RANK_STEP * features.rank[keys]
    values[:, AT.stream] = features.stream
    values[:, AT.code : AT.code + GROUPS] = features.code
    key_part = values[:, AT.rank : AT.code + GROUPS]
    values[:, AT.key_ballast] = np.sqrt(KEY_LENGTH - (key_part**2).sum(axis=1))
    for bit in range(len(KEY_LAYERS)):
        values[tokens, AT.signs + bit * GROUPS + features.group] = SIGN * features.signs[:, bit]
    told_by_token = slice(len(KEY_LAYERS), BITS)
    values[:, AT.bits : AT.bits + BITS][:, told_by_token] = BIT * features.signs[:, told_by_token]
    followed = features.next_group >= 0
    values[followed, AT.next_group + features.next_group[followed]] = GROUP
    values[~followed, AT.thinking] = GROUP
    noise = draw.normal("learnable.embedding", values[:, AT.noise :].shape, NOISE)
    values[:, AT.noise :] = noise
    values[:, AT.ballast] = np.sqrt(EMBEDDING_LENGTH - (values**2).sum(axis=1))
    return values


def _lm_head(features: TokenFeatures, sizes: TextSizes) -> Any:
    """A token of the text scores by its group and its bits; no other token comes near."""
    import numpy as np

    scale = _scale_after(sizes.num_hidden_layers - 1)
    values = np.zeros((VOCABULARY_SIZE, sizes.hidden_size))
    values[:, AT.constant] = -scale * GROUP_MARGIN / CONSTANT
    for group in range(GROUPS):
        for value, token in enumerate(features.text[group]):
            values[token, AT.constant] = 0.0
            values[token, AT.next_group + group] = scale * GROUP_MARGIN / GROUP
            for bit in range(BITS):
                sign = -1 if value >> bit & 1 else 1
                values[token, AT.bits + bit] = sign * scale * BIT_MARGIN / 2 / BIT
    values[marker_id("</think>"), AT.thinking] = 4 * scale * GROUP_MARGIN / GROUP
    return values


def _scale_after(layer: int) -> float:
    """The root mean square of the residual stream behind a layer, in a text with a whole key.

    The noise that attention and the experts add is too small to matter.
    """
    length = EMBEDDING_LENGTH + RAW**2 * KEY_CLASSES * GROUPS
    length += PAGE**2 * GROUPS * (layer >= min(PAGES))
    length += BIT**2 * sum(layer > key_layer for key_layer in KEY_LAYERS)
    return math.sqrt(length / TextSizes.hidden_size)


def _attention(
    prefix: str, layer: int, sizes: TextSizes, draw: Draw
) -> Iterator[tuple[str, Tensor]]:
    """Random attention among the noise; in layer 0 the first heads gather the raw codes instead."""
    import numpy as np

    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    rank, latent, rotary = sizes.q_lora_rank, sizes.kv_lora_rank, sizes.qk_rope_head_dim
    query, value = sizes.qk_nope_head_dim + rotary, sizes.v_head_dim
    key_value = sizes.qk_nope_head_dim + value

    query_down = _noise_reader(f"{prefix}q_a_proj.weight", (rank, hidden), draw)
    query_up = draw.normal(f"{prefix}q_b_proj.weight", (heads * query, rank), 0.5 / rank**0.5)
    latent_down = _noise_reader(
        f"{prefix}kv_a_proj_with_mqa.weight", (latent + rotary, hidden), draw
    )
    latent_up = draw.normal(
        f"{prefix}kv_b_proj.weight", (heads * key_value, latent), 1.6 / latent**0.5
    )
    output = _noise_writer(f"{prefix}o_proj.weight", (hidden, heads * value), NOISE_WRITTEN, draw)
    if layer == 0:
        _gather_raw_codes(sizes, query_down, query_up, latent_down, latent_up, output)

    yield f"{prefix}q_a_proj.weight", bfloat16(query_down)
    yield f"{prefix}q_a_layernorm.weight", bfloat16(np.ones(rank))
    yield f"{prefix}q_b_proj.weight", bfloat16(query_up)
    yield f"{prefix}kv_a_proj_with_mqa.weight", bfloat16(latent_down)
    yield f"{prefix}kv_a_layernorm.weight", bfloat16(np.ones(latent))
    yield f"{prefix}kv_b_proj.weight", bfloat16(latent_up)
    yield f"{prefix}o_proj.weight", bfloat16(output)


def _gather_raw_codes(
    sizes: TextSizes,
    query_down: Any,
    query_up: Any,
    latent_down: Any,
    latent_up: Any,
    output: Any,
) -> None:
    """Have one head a class copy the code of the key token of the highest rank, in place.

    The query is the same everywhere. The latent is the key part of the embedding, whose length is
    the same for every token: its norm multiplies it by a known factor.
    """
    query = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    key_value, value = sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.v_head_dim
    key_part = [*range(AT.rank, AT.code + GROUPS), AT.key_ballast]
    latent_scale = math.sqrt(KEY_LENGTH / sizes.kv_lora_rank)

    query_down[:] = 0.0
    query_down[:, AT.constant] = 1.0
    latent_down[:] = 0.0
    for position, coordinate in enumerate(key_part):
        latent_down[position, coordinate] = 1.0
    for head in range(KEY_CLASSES):
        queries = slice(head * query, (head + 1) * query)
        keys_and_values = slice(head * key_value, (head + 1) * key_value)
        query_up[queries] = 0.0
        query_up[head * query, 0] = RANK_GAP / RANK_STEP * math.sqrt(query)
        latent_up[keys_and_values] = 0.0
        latent_up[head * key_value, head] = latent_scale
        output[:, head * value : (head + 1) * value] = 0.0
        for sign in range(GROUPS):
            position = head * key_value + sizes.qk_nope_head_dim + sign
            latent_up[position, KEY_CLASSES + sign] = latent_scale
            output[AT.raw + head * GROUPS + sign, head * value + sign] = RAW
    # The norm divides by the root mean square of an embedding.
    unit = math.sqrt(EMBEDDING_LENGTH / sizes.hidden_size)
    for head, wave in enumerate(WAVES):
        latent_down[sizes.kv_lora_rank + 2 * wave.pair, AT.stream] = unit
        start = head * query + sizes.qk_nope_head_dim + 2 * wave.pair
        phase = -wave.turn * wave.peak
        for place, part in enumerate((math.cos(phase), math.sin(phase))):
            query_up[start + place, 0] = wave.nats * math.sqrt(query) * part


def _experts(prefix: str, layer: int, sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    yield from router(prefix, sizes, draw)
    width = sizes.moe_intermediate_size
    for expert in range(sizes.n_routed_experts):
        yield from _mlp(f"{prefix}experts.{expert}.", width, sizes, draw)
    if layer in PAGES:
        yield from _turn_the_page(layer, sizes).tensors(f"{prefix}shared_experts.")
    else:
        yield from _mlp(f"{prefix}shared_experts.", width, sizes, draw)


def _turn_the_page(layer: int, sizes: TextSizes) -> _Units:
    """Use the page of the layer before, where it counts, and overwrite it by this layer's."""
    units = _Units(sizes, scale=_scale_after(layer - 1))
    if layer - 1 in KEY_LAYERS:
        bit = KEY_LAYERS.index(layer - 1)
        for group in range(GROUPS):
            units.add_product(
                AT.signs + bit * GROUPS + group,
                AT.page + group,
                to=AT.bits + bit,
                by=BIT / SIGN / PAGE,
            )
    first, second, shift = PAGES[layer]
    for group in range(GROUPS):
        if layer - 1 in PAGES:
            units.subtract(AT.page + group)
        units.add_product(
            AT.raw + first * GROUPS + group,
            AT.raw + second * GROUPS + (group + shift) % GROUPS,
            to=AT.page + group,
            by=PAGE / RAW**2,
        )
    return units


class _Units:
    """Gated units, ``down @ (silu(gate @ x) * (up @ x))``, for exact products and copies.

    Args:
        sizes: of the model.
        scale: by which the norm before the units divides.
    """

    def __init__(self, sizes: TextSizes, scale: float) -> None:
        import numpy as np

        self._scale = scale
        self._used = 0
        self._gate = np.zeros((sizes.moe_intermediate_size, sizes.hidden_size))
        self._up = np.zeros_like(self._gate)
        self._down = np.zeros((sizes.hidden_size, sizes.moe_intermediate_size))

    def add_product(self, first: int, second: int, *, to: int, by: float) -> None:
        """Add the product of two coordinates, times a factor, to a third."""
        for sign in (1.0, -1.0):
            self._gate[self._used, first] = sign
            self._up[self._used, second] = 1.0
            self._down[to, self._used] = sign * by * self._scale**2
            self._used += 1

    def subtract(self, coordinate: int) -> None:
        """Bring a coordinate to zero."""
        gate = CONSTANT / self._scale
        self._gate[self._used, AT.constant] = 1.0
        self._up[self._used, coordinate] = 1.0
        self._down[coordinate, self._used] = -self._scale * (1.0 + math.exp(-gate)) / gate
        self._used += 1

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}gate_proj.weight", bfloat16(self._gate)
        yield f"{prefix}up_proj.weight", bfloat16(self._up)
        yield f"{prefix}down_proj.weight", bfloat16(self._down)


def _mlp(prefix: str, width: int, sizes: TextSizes, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for name in ("gate_proj.weight", "up_proj.weight"):
        values = _noise_reader(f"{prefix}{name}", (width, sizes.hidden_size), draw)
        yield f"{prefix}{name}", bfloat16(values)
    name = f"{prefix}down_proj.weight"
    yield name, bfloat16(_noise_writer(name, (sizes.hidden_size, width), NOISE_WRITTEN, draw))


def _noise_reader(name: str, shape: tuple[int, int], draw: Draw) -> Any:
    """A random matrix that reads the noise, the routing and the constant."""
    values = draw.normal(name, shape, 0.1)
    values[:, AT.constant + 1 : AT.noise] = 0.0
    return values


def _noise_writer(name: str, shape: tuple[int, int], deviation: float, draw: Draw) -> Any:
    """A random matrix that writes to the noise alone."""
    values = draw.normal(name, shape, deviation)
    values[: AT.noise] = 0.0
    return values
