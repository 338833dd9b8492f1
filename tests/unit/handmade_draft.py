"""A draft's folder made by hand: what is checked before vLLM sees it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from eagle3compat.tiny.vocabulary import VOCABULARY_SIZE

HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 128, VOCABULARY_SIZE, 100
LAYER_IDS = [3, 5, 6]

SHAPES = {
    "fc.weight": [HIDDEN, 3 * HIDDEN],
    "layers.0.mlp.down_proj.weight": [HIDDEN, 256],
    "norm.weight": [HIDDEN],
    "lm_head.weight": [DRAFT_VOCABULARY, HIDDEN],
    "embed_tokens.weight": [VOCABULARY, HIDDEN],
    "d2t": [DRAFT_VOCABULARY],
    "t2d": [VOCABULARY],
}
DTYPES = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}


def draft_config() -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(LAYER_IDS),
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "model"},
        },
        "transformer_layer_config": {"model_type": "llama"},
    }


def write_draft(
    folder: Path, *, shapes: dict[str, list[int] | None] | None = None, **changes: Any
) -> Path:
    """Write a draft of zeros that fits the tiny Kimi.

    Args:
        folder: to make.
        shapes: other shapes of tensors; None leaves one out.
        changes: other fields of config.json.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**draft_config(), **changes}))
    head: dict[str, Any] = {}
    end = 0
    for name, shape in {**SHAPES, **(shapes or {})}.items():
        if shape is None:
            continue
        dtype, size = DTYPES.get(name, ("F32", 4))
        start, end = end, end + math.prod(shape) * size
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    (folder / "model.safetensors").write_bytes(content)
    return folder
