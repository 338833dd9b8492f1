"""Sizes of the tiny Kimi-K2.5 and the JSON files that tell vLLM and transformers about them.

The keys and their nesting are those of the real checkpoint's files, so that whatever reads the
real ones (a nested ``text_config``, YaRN, ``media_proc_cfg``) is put to work here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle3compat.tiny.vocabulary import MARKERS, VOCABULARY_SIZE, marker_id


@dataclass(frozen=True)
class Variant:
    """Which tiny checkpoint to write.

    Args:
        mla_gpu: the head dimensions that MLA kernels are built for (a latent of 512 beside 64
            rotary dimensions). Without it they are small, which needs ``VLLM_MLA_DISABLE=1``.
        text_only: a plain DeepseekV3ForCausalLM with the same language-model weights, for vLLM
            before 0.15.1, which has no Kimi-K2.5, and for 0.15.1 on a CPU, whose Kimi-K2.5 wants a
            GPU. Only its tokenizer is remote code. Before 0.14 vLLM's CPU attention takes it with
            `mla_gpu` alone.
        yarn: scaled rotary embedding, as the real checkpoint has it. Without it the checkpoint also
            meets the fault of vLLM's CPU rotary kernel, which YaRN's own class does not use.
        learnable: text that a draft of one layer can learn, but only from the hidden states of the
            right layers (`eagle3compat.tiny.learnable`), in place of random text, which no draft
            learns.
    """

    mla_gpu: bool = False
    text_only: bool = False
    yarn: bool = False
    learnable: bool = False


@dataclass(frozen=True)
class TextSizes:
    """Dimensions of the language model, named as in its configuration."""

    qk_nope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 64
    hidden_size: int = 128
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 8
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    vocab_size: int = VOCABULARY_SIZE


@dataclass(frozen=True)
class VisionSizes:
    """Dimensions of the vision tower and of the projector behind it."""

    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    patch_size: int = 14
    position_grid: int = 8
    merge: int = 2


VISION = VisionSizes()


def text_sizes(variant: Variant) -> TextSizes:
    """The language model's dimensions in a variant."""
    if variant.mla_gpu:
        return TextSizes(qk_nope_head_dim=128, v_head_dim=128, kv_lora_rank=512)
    # Heads of 48 + 64: a multiple of 16 but not of 32, for which vLLM takes an attention that runs
    # in bfloat16 on any CPU. 0.16.0 has none for heads of 128 on a CPU with AMX.
    return TextSizes(qk_nope_head_dim=48, v_head_dim=48, kv_lora_rank=64)


# As in the real checkpoint, except that the context before scaling is 128 tokens, not 4096: the
# 64-fold context is what vLLM reserves its cache for unless told otherwise, and 8192 tokens fit in
# 1 GiB. transformers takes the factor from the ratio of both, so they must not disagree.
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONTEXT_LENGTH = 8192


def model_configuration(variant: Variant) -> dict[str, Any]:
    """The content of ``config.json``."""
    text = _text_configuration(variant)
    if variant.text_only:
        return {**text, "model_type": "deepseek_v3"}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": _vision_configuration(text["hidden_size"]),
        "ignore_index": -100,
        "media_placeholder_token_id": marker_id("<|media_pad|>"),
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "tie_word_embeddings": False,
        **_token_ids(),
        "torch_dtype": "bfloat16",
    }


def _token_ids() -> dict[str, int]:
    return {
        "bos_token_id": marker_id("[BOS]"),
        "eos_token_id": marker_id("<|im_end|>"),
        "pad_token_id": marker_id("[PAD]"),
    }


def _text_configuration(variant: Variant) -> dict[str, Any]:
    sizes = text_sizes(variant)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **vars(sizes),
        "num_key_value_heads": sizes.num_attention_heads,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_theta": 50000.0,
        "rope_scaling": dict(YARN) if variant.yarn else None,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        **_token_ids(),
        "torch_dtype": "bfloat16",
    }


def _vision_configuration(text_hidden_size: int) -> dict[str, Any]:
    grid = VISION.position_grid
    return {
        "model_type": "kimi_k25_vision",
        "patch_size": VISION.patch_size,
        "init_pos_emb_height": grid,
        "init_pos_emb_width": grid,
        "init_pos_emb_time": 4,
        # The same three under the names that transformers' own Kimi-K2.5 (5.x) gives them.
        "pos_emb_height": grid,
        "pos_emb_width": grid,
        "pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "video_attn_type": "spatial_temporal",
        "hidden_size": VISION.hidden_size,
        "intermediate_size": VISION.intermediate_size,
        "num_hidden_layers": VISION.num_hidden_layers,
        "num_attention_heads": VISION.num_attention_heads,
        "merge_kernel_size": [VISION.merge, VISION.merge],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": VISION.hidden_size,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": text_hidden_size,
    }


def generation_configuration() -> dict[str, Any]:
    """The content of ``generation_config.json``."""
    return _token_ids()


def image_processor_configuration() -> dict[str, Any]:
    """The content of ``preprocessor_config.json``, with every limit of ``media_proc_cfg``."""
    return {
        "auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"},
        "image_processor_type": "KimiK25VisionProcessor",
        "media_proc_cfg": {
            "patch_size": VISION.patch_size,
            "merge_kernel_size": VISION.merge,
            "in_patch_limit": 256,
            "in_patch_limit_each_frame": 64,
            "in_patch_limit_video": 256,
            "patch_limit_on_one_side": 32,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "temporal_merge_kernel_size": 4,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "timestamp_mode": "hh:mm:ss.fff",
        },
    }


def tokenizer_configuration() -> dict[str, Any]:
    """The content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "additional_special_tokens": [name for name, marker in MARKERS.items() if marker.skipped],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "added_tokens_decoder": {
            str(marker_id(marker)): {
                "content": marker,
                "special": MARKERS[marker].skipped,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            }
            for marker in MARKERS
        },
    }
