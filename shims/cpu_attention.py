"""Attend densely on a CPU, where flex attention is slow, or has no backward pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import ATTEND
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.settled import settle
from eagle3compat.shim import Contract, Finding, Patch, Process, Shim, Stage, Status

_ID = "cpu-attention"
_ATTENTION = "speculators.models.eagle3.attention"
_ATTEND = "flex_attention_forward"


def _install(module: ModuleType, patcher: Patcher) -> None:
    flex_attention = module.flex_attention

    # On a GPU it is compiled with what calls it, and adds nothing there.
    def attention(
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.device.type == "cpu" and score_mod is None:
            mask = _dense_mask(module.torch, block_mask, query.shape[-2], key.shape[-2])
            return module.torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )
        return flex_attention(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    patcher.replace(module, "flex_attention", attention)


def _dense_mask(torch: Any, block_mask: Any, rows: int, columns: int) -> Any:
    """Which of ``columns`` keys each of ``rows`` queries attends to: a bool tensor of both."""
    settle(_ID, "dense attention, on the CPU")
    any_head = torch.zeros((), dtype=torch.long)
    mask: Any = block_mask.mask_mod(
        any_head, any_head, torch.arange(rows).unsqueeze(-1), torch.arange(columns)
    )
    return mask


SHIM = Shim(
    id=_ID,
    title="dense attention for training on a CPU",
    contracts=(
        Contract(
            _ATTENTION,
            _ATTEND,
            "torch.nn.attention.flex_attention.flex_attention",
            "an attention that gradients go through",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=None,
    probe=known_function(
        _ATTENTION,
        _ATTEND,
        {
            ATTEND: Finding(
                Status.NEEDED,
                "flex attention whatever the device is",
                "where the tensors are; settled at the first step",
            )
        },
        "flex_attention_output = flex_attention(",
    ),
    patches=(Patch(_ATTENTION, _install),),
    process=Process.PARENT,
    why=(
        "On a CPU, torch 2.13 refuses gradients through flex attention, and earlier ones compute "
        "its mask element by element."
    ),
    upstream="none: training on a CPU is nothing that speculators sets out to do",
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    stages=(Stage.TRAINING,),
)
