"""What training takes of a verifier's checkpoint: its text part's fields, and tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from eagle3compat.errors import Refusal

EMBEDDINGS = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields of a checkpoint's config, which a wrapper keeps one level down.

    Args:
        config: what config.json holds.
    """
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def served_layer_ids(extracted: Sequence[int]) -> list[int]:
    """The auxiliary layers of a draft's config, as vLLM counts them.

    Extraction's id i is the output of decoder layer i; vLLM's is the input of layer i, which is
    the output of the one before. vLLM feeds a draft the states by rising layer, whatever order the
    config has.

    Args:
        extracted: ids of the auxiliary layers, without the target's, as extraction counts them.

    Returns:
        vLLM's ids, rising.
    """
    return [layer + 1 for layer in sorted(extracted)]


def default_layers(num_hidden_layers: int) -> tuple[int, int, int]:
    """The auxiliary layers that speculators 0.3 and 0.4 extract when they are told of none."""
    return 2, num_hidden_layers // 2, num_hidden_layers - 3


def stored_name(names: Iterable[str], wanted: str, checkpoint: str) -> str | None:
    """The name of a tensor in a checkpoint: as it is, or below a wrapper's prefix.

    Args:
        names: of all tensors that the checkpoint has.
        wanted: the name in a plain language model, for example ``model.norm.weight``.
        checkpoint: what to call it in an error.

    Returns:
        The name, or None where no tensor has it.

    Raises:
        Refusal: several tensors could be meant.
    """
    there = set(names)
    if wanted in there:
        return wanted
    below = sorted(name for name in there if name.endswith(f".{wanted}"))
    if len(below) > 1:
        raise Refusal(
            checkpoint,
            f"one tensor {wanted}, alone or below a prefix",
            ", ".join(below),
            "Which of them is the language model's cannot be told.",
        )
    return below[0] if below else None


def tensor_names(loading: ModuleType, checkpoint: str) -> list[str]:
    """The names of all tensors in a checkpoint.

    Args:
        loading: ``speculators.utils.loading``, which finds a folder's or a hub's files.
        checkpoint: folder, or name on the hub.

    Raises:
        FileNotFoundError: the folder has neither an index nor a single safetensors file.
    """
    try:
        index = loading._resolve_file(checkpoint, "model.safetensors.index.json")
    except (FileNotFoundError, loading.EntryNotFoundError):
        file = loading._resolve_file(checkpoint, "model.safetensors")
        with loading.safe_open(file, framework="pt", device="cpu") as tensors:
            return list(tensors.keys())
    weight_map: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    return list(weight_map)
