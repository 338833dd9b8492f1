"""How many parameters a checkpoint has, how many bytes, and what tensor parallelism splits.

Counted from ``config.json`` for architectures that are known here: the DeepSeek-V3 family, which
Kimi-K2.5's language model is of, with Kimi's vision tower; and dense Llama, Mistral, Qwen2 and
Qwen3. Of any other nothing is guessed. What vLLM splits over GPUs and what it keeps whole on each
is as in its ``models/deepseek_v2.py`` and ``models/llama.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eagle3compat.verifier_parts import text_part

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

DEEPSEEK_TYPES = ("deepseek_v3", "kimi_k2")
LLAMA_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# vLLM pads the vocabulary to a multiple of this before it splits it.
VOCABULARY_PADDING = 64


class Share(Enum):
    """How tensor parallelism lays a tensor on GPUs."""

    SPLIT = "split"
    WHOLE = "whole on each"
    VOCABULARY = "split by token, padded"
    HEADS = "split by key-value head, at least one on each"


@dataclass(frozen=True)
class Tensor:
    """Tensors of one shape.

    Attributes:
        name: of the module that has the first of them, as the checkpoint names it.
        shape: of each.
        count: how many there are, such as one an expert.
        share: how tensor parallelism lays it.
        linear: whether it is a linear layer's weight, which a quantisation may replace.
        item_bytes: of an element, where it is not that of the checkpoint's dtype.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    share: Share = Share.SPLIT
    linear: bool = False
    item_bytes: int | None = None

    @property
    def parameters(self) -> int:
        """Of all of them."""
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Quantisation:
    """How the weights of linear layers are stored.

    Attributes:
        title: in words.
        bits: of an element.
        block: elements that share a scale: (output, input).
        scale_bytes: of a scale.
        is_left: tells from a module's name whether it is left as it is.
    """

    title: str
    bits: int
    block: tuple[int, int]
    scale_bytes: int
    is_left: Callable[[str], bool]

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Of one weight (output, input): packed in 32-bit words where it has less than 8 bits."""
        out, inner = shape
        elements = out * math.ceil(inner * self.bits / 32) * 4 if self.bits < 8 else out * inner
        scales = math.ceil(out / self.block[0]) * math.ceil(inner / self.block[1])
        return elements + scales * self.scale_bytes


@dataclass(frozen=True)
class Weights:
    """All tensors that the engine loads.

    Attributes:
        tensors: of the checkpoint; those of layers for multi-token prediction are not loaded.
        key_value_heads: of the attention; None where its cache is one latent for all heads.
        quantisation: of linear layers, or None.
    """

    tensors: tuple[Tensor, ...]
    key_value_heads: int | None
    quantisation: Quantisation | None

    @property
    def parameters(self) -> int:
        """How many there are; a quantised one counts once."""
        return sum(tensor.parameters for tensor in self.tensors)

    def bytes(self, item_bytes: int, *, quantised: bool = True, gpus: int = 1) -> int:
        """Bytes of the weights, or of one GPU's part of them.

        Args:
            item_bytes: of an element that is not quantised.
            quantised: whether linear layers are as the checkpoint has them.
            gpus: that share them; for one, it is the size of the checkpoint.
        """
        return sum(self._bytes(tensor, item_bytes, quantised, gpus) for tensor in self.tensors)

    def _bytes(self, tensor: Tensor, item_bytes: int, quantised: bool, gpus: int) -> int:
        scheme = self.quantisation
        if quantised and scheme and tensor.linear and not scheme.is_left(tensor.name):
            whole = tensor.count * scheme.bytes_of(tensor.shape)
        else:
            whole = tensor.parameters * (tensor.item_bytes or item_bytes)
        if gpus == 1 or tensor.share is Share.WHOLE:
            return whole
        if tensor.share is Share.VOCABULARY:
            padded = math.ceil(tensor.shape[0] / VOCABULARY_PADDING) * VOCABULARY_PADDING
            return math.ceil(padded / gpus) * whole // tensor.shape[0]
        if tensor.share is Share.HEADS and self.key_value_heads:
            return math.ceil(whole / min(gpus, self.key_value_heads))
        return math.ceil(whole / gpus)


def count_weights(config: Mapping[str, Any]) -> Weights | None:
    """The tensors that a ``config.json`` describes, or None for what is not known here.

    Args:
        config: of a checkpoint; its language model may be under ``text_config``.
    """
    text = text_part(config)
    wrapped = "text_config" in config
    prefix = "language_model." if wrapped else ""
    quantisation = config.get("quantization_config") or text.get("quantization_config")
    kind = text.get("model_type")
    try:
        if kind in DEEPSEEK_TYPES:
            tensors = list(_deepseek(text, prefix))
            heads = None
        elif kind in LLAMA_TYPES:
            tensors = list(_llama(text, prefix))
            heads = _key_value_heads(text)
        else:
            return None
        if wrapped and config.get("model_type") == "kimi_k25":
            tensors += _kimi_vision(config["vision_config"], text["hidden_size"])
        elif wrapped:
            return None
        scheme = _read_quantisation(quantisation) if quantisation else None
    except (KeyError, TypeError):
        return None
    if quantisation and scheme is None:
        return None
    return Weights(tuple(tensors), heads, scheme)


def _deepseek(text: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    yield from _embeddings(text, prefix)
    for layer in range(layers):
        name = f"{prefix}model.layers.{layer}."
        yield Tensor(f"{name}input_layernorm", (hidden,), 2, Share.WHOLE)
        yield from _latent_attention(text, f"{name}self_attn.")
        is_moe = (
            layer >= text["first_k_dense_replace"] and layer % text.get("moe_layer_freq", 1) == 0
        )
        if is_moe:
            yield from _experts(text, f"{name}mlp.")
        else:
            yield from _gated_mlp(f"{name}mlp.", hidden, text["intermediate_size"])


def _latent_attention(text: Mapping[str, Any], name: str) -> Iterator[Tensor]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    latent, rotary = text["kv_lora_rank"], text["qk_rope_head_dim"]
    query = heads * (text["qk_nope_head_dim"] + rotary)
    rank = text["q_lora_rank"]
    biased = bool(text.get("attention_bias"))
    if rank is None:
        yield _linear(f"{name}q_proj", (query, hidden))
    else:
        yield _linear(f"{name}q_a_proj", (rank, hidden), Share.WHOLE)
        yield Tensor(f"{name}q_a_layernorm", (rank,), share=Share.WHOLE)
        yield _linear(f"{name}q_b_proj", (query, rank))
        if biased:
            yield Tensor(f"{name}q_a_proj", (rank,), share=Share.WHOLE)
    yield _linear(f"{name}kv_a_proj_with_mqa", (latent + rotary, hidden), Share.WHOLE)
    yield Tensor(f"{name}kv_a_layernorm", (latent,), share=Share.WHOLE)
    out = heads * (text["qk_nope_head_dim"] + text["v_head_dim"])
    yield _linear(f"{name}kv_b_proj", (out, latent))
    yield _linear(f"{name}o_proj", (hidden, heads * text["v_head_dim"]))
    if biased:
        yield Tensor(f"{name}kv_a_proj_with_mqa", (latent + rotary,), share=Share.WHOLE)
        yield Tensor(f"{name}o_proj", (hidden,), share=Share.WHOLE)


def _experts(text: Mapping[str, Any], name: str) -> Iterator[Tensor]:
    hidden, width, experts = (
        text["hidden_size"],
        text["moe_intermediate_size"],
        text["n_routed_experts"],
    )
    yield Tensor(f"{name}gate", (experts, hidden), share=Share.WHOLE)
    if text.get("topk_method") == "noaux_tc":
        yield Tensor(f"{name}gate", (experts,), share=Share.WHOLE, item_bytes=4)
    yield from _gated_mlp(f"{name}experts.0.", hidden, width, experts)
    if text["n_shared_experts"]:
        yield from _gated_mlp(f"{name}shared_experts.", hidden, width * text["n_shared_experts"])


def _llama(text: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    kind, hidden, heads = text["model_type"], text["hidden_size"], text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    query, key_value = heads * head, _key_value_heads(text) * head
    yield from _embeddings(text, prefix)
    for layer in range(text["num_hidden_layers"]):
        name = f"{prefix}model.layers.{layer}."
        yield Tensor(f"{name}input_layernorm", (hidden,), 2, Share.WHOLE)
        yield _linear(f"{name}self_attn.q_proj", (query, hidden))
        for projection in ("k_proj", "v_proj"):
            yield _linear(f"{name}self_attn.{projection}", (key_value, hidden), Share.HEADS)
        yield _linear(f"{name}self_attn.o_proj", (hidden, query))
        if kind == "qwen2" or text.get("attention_bias"):
            yield Tensor(f"{name}self_attn.q_proj", (query,))
            yield Tensor(f"{name}self_attn.k_proj", (key_value,), 2, Share.HEADS)
        if kind != "qwen2" and text.get("attention_bias"):
            yield Tensor(f"{name}self_attn.o_proj", (hidden,), share=Share.WHOLE)
        if kind == "qwen3":
            yield Tensor(f"{name}self_attn.q_norm", (head,), 2, Share.WHOLE)
        inner = text["intermediate_size"]
        yield from _gated_mlp(f"{name}mlp.", hidden, inner)
        if text.get("mlp_bias"):
            yield Tensor(f"{name}mlp.gate_proj", (inner,), 2)
            yield Tensor(f"{name}mlp.down_proj", (hidden,), share=Share.WHOLE)


def _key_value_heads(text: Mapping[str, Any]) -> int:
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def _embeddings(text: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    shape = (text["vocab_size"], text["hidden_size"])
    yield Tensor(f"{prefix}model.embed_tokens", shape, share=Share.VOCABULARY)
    yield Tensor(f"{prefix}model.norm", shape[1:], share=Share.WHOLE)
    if not text.get("tie_word_embeddings"):
        yield Tensor(f"{prefix}lm_head", shape, share=Share.VOCABULARY, linear=True)


def _gated_mlp(name: str, hidden: int, inner: int, count: int = 1) -> Iterator[Tensor]:
    for projection in ("gate_proj", "up_proj"):
        yield _linear(f"{name}{projection}", (inner, hidden), count=count)
    yield _linear(f"{name}down_proj", (hidden, inner), count=count)


def _linear(
    name: str, shape: tuple[int, int], share: Share = Share.SPLIT, count: int = 1
) -> Tensor:
    return Tensor(name, shape, count, share, linear=True)


def _kimi_vision(vision: Mapping[str, Any], text_hidden: int) -> Iterator[Tensor]:
    """The vision tower and the projector behind it, counted as whole on each GPU."""

    def size(name: str) -> int:
        return int(vision[name] if name in vision else vision[f"vt_{name}"])

    width, inner = size("hidden_size"), size("intermediate_size")
    patch = vision["patch_size"]
    yield from _biased("vision_tower.patch_embed.proj", (width, 3, patch, patch))
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    yield Tensor("vision_tower.patch_embed.pos_emb", grid, share=Share.WHOLE)
    for block in range(size("num_hidden_layers")):
        name = f"vision_tower.encoder.blocks.{block}."
        yield Tensor(f"{name}norm0", (width,), 4, Share.WHOLE)
        for part, shape in (
            ("wqkv", (3 * width, width)),
            ("wo", (width, width)),
            ("mlp.fc0", (inner, width)),
            ("mlp.fc1", (width, inner)),
        ):
            yield from _biased(f"{name}{part}", shape)
    yield Tensor("vision_tower.encoder.final_layernorm", (width,), 2, Share.WHOLE)
    merged = width * math.prod(vision["merge_kernel_size"])
    yield Tensor("mm_projector.pre_norm", (width,), 2, Share.WHOLE)
    yield from _biased("mm_projector.proj.0", (merged, merged))
    yield from _biased("mm_projector.proj.2", (text_hidden, merged))


def _biased(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    # Kimi's quantisation is of its language model alone.
    yield Tensor(name, shape, share=Share.WHOLE)
    yield Tensor(name, shape[:1], share=Share.WHOLE)


def _read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """compressed-tensors with one group of symmetric integers, or fp8 in blocks; else None."""
    method = config["quant_method"]
    if method == "fp8" and config.get("weight_block_size"):
        out, inner = config["weight_block_size"]
        left = tuple(config.get("modules_to_not_convert") or ("lm_head",))
        return Quantisation(
            f"fp8 in blocks of {out} x {inner}",
            8,
            (out, inner),
            4,
            lambda name: name.endswith(left),
        )
    groups = list(config.get("config_groups", {}).values())
    if method != "compressed-tensors" or len(groups) != 1 or groups[0]["targets"] != ["Linear"]:
        return None
    weights = groups[0]["weights"]
    if weights["type"] != "int" or weights["strategy"] != "group" or not weights["symmetric"]:
        return None
    size, bits = weights["group_size"], weights["num_bits"]
    ignored = tuple(config.get("ignore") or ())
    return Quantisation(
        f"int{bits} in groups of {size}",
        bits,
        (1, size),
        2,
        lambda name: _is_ignored(name, ignored),
    )


def _is_ignored(name: str, patterns: tuple[str, ...]) -> bool:
    """As compressed-tensors reads ``ignore``: names, and expressions after ``re:``."""
    return any(
        re.match(pattern[3:], name) is not None
        if pattern.startswith("re:")
        else name == pattern or name.endswith(f".{pattern}")
        for pattern in patterns
    )
