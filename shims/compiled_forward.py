"""Run the draft's forward pass as written where there is no accelerator to compile it for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import DRAFT_FORWARD_030, DRAFT_FORWARD_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.settled import settle
from eagle3compat.shim import DRAFT_MODEL, Contract, Finding, Patch, Process, Shim, Stage, Status

_ID = "compiled-forward"
_FORWARD = "Eagle3DraftModel.forward"


def _install(module: ModuleType, patcher: Patcher) -> None:
    compiled = vars(module.Eagle3DraftModel)["forward"]
    # Where compilation is turned off, torch gives the function back as it is.
    as_written = getattr(compiled, "_torchdynamo_orig_callable", compiled)

    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if module.torch.accelerator.is_available():
            settle(_ID, "compiled, for an accelerator")
            return wrapped(*args, **kwargs)
        settle(_ID, "not compiled: no accelerator")
        return as_written(instance, *args, **kwargs)

    patcher.wrap(module.Eagle3DraftModel, "forward", forward)


SHIM = Shim(
    id=_ID,
    title="the draft's forward pass uncompiled on a CPU",
    contracts=(
        Contract(
            DRAFT_MODEL,
            _FORWARD,
            "torch.compile",
            "a backward pass through compiled flex attention",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=None,
    probe=known_function(
        DRAFT_MODEL,
        _FORWARD,
        {
            DRAFT_FORWARD_030: Finding(
                Status.NEEDED,
                "compiled whatever the device is",
                "whether there is an accelerator; settled at the first step",
            ),
            DRAFT_FORWARD_040: Finding(Status.NOT_NEEDED, "compiled where there is CUDA"),
        },
        "@torch.compile",
    ),
    patches=(Patch(DRAFT_MODEL, _install),),
    process=Process.PARENT,
    why=(
        "Compiled for a CPU, torch's flex attention has no backward pass, and training raises. "
        "Dense attention (cpu-attention) has one, after minutes of a C++ compiler."
    ),
    upstream="none: speculators 0.4.0 compiles where there is CUDA",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
    stages=(Stage.TRAINING,),
)
