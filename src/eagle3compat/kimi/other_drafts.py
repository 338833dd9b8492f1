"""Drafts to compare a trained one with: one that learnt nothing, and one fed other layers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.output_head import open_output_head
from eagle3compat.kimi.served_draft import CONFIG, LAYER_IDS, WEIGHTS, read_served_draft
from eagle3compat.kimi.verifier import read_verifier

if TYPE_CHECKING:
    import torch

KEPT = ("embed_tokens.weight", "d2t", "t2d")
"""What training does not change."""


def write_untrained_draft(model: Path, draft: Path, out: Path, *, seed: int = 0) -> None:
    """Write a draft of the same shape that learnt nothing.

    As where speculators begins: the verifier's embeddings and output matrix, norms of ones, and
    linear layers drawn evenly from -1/√n to 1/√n, n being their inputs.

    Args:
        model: folder of the verifier's checkpoint.
        draft: folder of a trained draft.
        out: the folder to write; it must not exist.
        seed: of the linear layers.

    Raises:
        InputError: the draft does not fit the verifier, or the folder cannot be written.
    """
    import torch
    from safetensors.torch import load_file, save_file

    read_served_draft(draft, read_verifier(model))
    trained = load_file(draft / WEIGHTS)
    generator = torch.Generator().manual_seed(seed)
    untrained = {
        name: tensor if name in KEPT else _untrained(name, tensor, generator)
        for name, tensor in trained.items()
    }
    untrained["lm_head.weight"] = _output_rows(model, trained)
    _make_folder(out)
    shutil.copyfile(draft / CONFIG, out / CONFIG)
    save_file(untrained, out / WEIGHTS, metadata={"format": "pt"})


def write_draft_with_layers(draft: Path, out: Path, layer_ids: Sequence[int]) -> None:
    """Write a copy of a draft that vLLM feeds the states of other layers.

    Args:
        draft: folder of a draft.
        out: the folder to write; it must not exist.
        layer_ids: as many as the draft's own, as vLLM counts them: i is the input of layer i.

    Raises:
        InputError: their number is another, or the folder cannot be written.
    """
    config: dict[str, Any] = json.loads((draft / CONFIG).read_text(encoding="utf-8"))
    if len(layer_ids) != len(config[LAYER_IDS]):
        raise InputError(
            f"layer ids {list(layer_ids)}: expected as many as {draft} has: {config[LAYER_IDS]}"
        )
    config[LAYER_IDS] = list(layer_ids)
    _make_folder(out)
    shutil.copyfile(draft / WEIGHTS, out / WEIGHTS)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _untrained(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    import torch

    if tensor.dim() == 1:
        return torch.full_like(tensor, 0.0 if name.endswith("bias") else 1.0)
    bound = 1.0 / math.sqrt(tensor.shape[1])
    drawn = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)
    return drawn.to(tensor.dtype)


def _output_rows(model: Path, draft: dict[str, torch.Tensor]) -> torch.Tensor:
    """The verifier's output matrix, of the tokens that the draft has."""
    import torch

    head = open_output_head(model)
    tokens = torch.arange(head.vocab_size)
    if "t2d" in draft:
        tokens = tokens[draft["t2d"].bool()]
    dtype = draft["lm_head.weight"].dtype
    return head.rows(tokens, dtype).to(dtype)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{out}: expected a new folder ({error})") from error
