"""Load a checkpoint to the CPU where there is no accelerator, instead of to the first GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import CHECKPOINTS_030, CHECKPOINTS_040
from eagle3compat.patching import Patcher, overlaid
from eagle3compat.probes import known_function
from eagle3compat.settled import settle
from eagle3compat.shim import CHECKPOINTER, Contract, Finding, Patch, Process, Shim, Stage, Status

_ID = "checkpoint-device"
_CONDITION = "whether there is an accelerator; settled when a checkpoint is loaded"


def _install(module: ModuleType, patcher: Patcher) -> None:
    torch = module.torch

    def there(device: Any) -> Any:
        """The device that was asked for, or the CPU where it is a GPU and there is none."""
        if not str(device).startswith("cuda") or torch.accelerator.is_available():
            settle(_ID, f"device {device}")
            return device
        settle(_ID, "no accelerator: the CPU")
        return "cpu"

    def get_current_device(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        # A torch that was built for CUDA has a current accelerator where there is no driver.
        return wrapped(*args, **kwargs) if torch.accelerator.is_available() else there("cuda:0")

    def load_state_dict(path: Any, device: Any) -> Any:
        return load_safetensors(path, there(device))

    def load(*args: Any, **kwargs: Any) -> Any:
        if "map_location" in kwargs:
            kwargs["map_location"] = there(kwargs["map_location"])
        return torch.load(*args, **kwargs)

    if hasattr(module, "get_current_device"):
        patcher.wrap(module, "get_current_device", get_current_device)
        return
    load_safetensors = module.load_safetensors_state_dict
    patcher.replace(module, "load_safetensors_state_dict", load_state_dict)
    patcher.replace(module, "torch", overlaid(torch, load=load))


SHIM = Shim(
    id=_ID,
    title="checkpoints loaded to the CPU where there is nothing else",
    contracts=(
        Contract(
            CHECKPOINTER,
            "SingleGPUCheckpointer.load_model_state_dict",
            "safetensors.safe_open",
            "a device that is there",
        ),
        Contract(
            CHECKPOINTER,
            "SingleGPUCheckpointer.load_optimizer_state_dict",
            "torch.load",
            "a device that is there",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=None,
    probe=known_function(
        CHECKPOINTER,
        "SingleGPUCheckpointer",
        {
            CHECKPOINTS_030: Finding(Status.NEEDED, "cuda:0 whatever there is", _CONDITION),
            CHECKPOINTS_040: Finding(
                Status.NEEDED, "get_current_device says cuda:0 on a CPU, or raises", _CONDITION
            ),
        },
        "load_safetensors_state_dict(",
    ),
    patches=(Patch(CHECKPOINTER, _install),),
    process=Process.PARENT,
    why="Without a GPU, a run that was interrupted cannot be taken up.",
    upstream="none: training on a CPU is nothing that speculators sets out to do",
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    stages=(Stage.TRAINING,),
)
