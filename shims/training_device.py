"""Train on the CPU where there is no accelerator, instead of on the first GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import SET_UP_MODEL_030, SET_UP_MODEL_040, TRAIN_EPOCH
from eagle3compat.patching import Patcher
from eagle3compat.probes import all_of, known_function
from eagle3compat.settled import settle
from eagle3compat.shim import TRAINER, Contract, Finding, Patch, Process, Shim, Stage, Status

_ID = "training-device"
_SET_UP = "Trainer.setup_model"
_FOUND = Finding(
    Status.NEEDED,
    "the model is moved to device number local_rank",
    "whether there is an accelerator; settled when the trainer is made",
)


def _install(module: ModuleType, patcher: Patcher) -> None:
    def setup_trainer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        if not isinstance(instance.local_rank, int) or module.torch.accelerator.is_available():
            settle(_ID, f"device {instance.local_rank}")
            return
        # torch reads a number as that of an accelerator. This also leaves out the progress bar,
        # which is the first rank's; the log has the same figures.
        instance.local_rank = "cpu"
        settle(_ID, "no accelerator: the CPU")

    patcher.wrap(module.Trainer, "setup_trainer", setup_trainer)


SHIM = Shim(
    id=_ID,
    title="model and batches on the CPU where there is nothing else",
    contracts=(
        Contract(TRAINER, _SET_UP, "torch.nn.Module.to", "a device that is there"),
        Contract(TRAINER, "Trainer.train_epoch", "torch.Tensor.to", "a device that is there"),
    ),
    consumers=">=0.3.0,<0.5",
    expected=None,
    probe=all_of(
        known_function(
            TRAINER,
            _SET_UP,
            {SET_UP_MODEL_030: _FOUND, SET_UP_MODEL_040: _FOUND},
            "self.model.to(self.local_rank)",
        ),
        known_function(TRAINER, "Trainer.train_epoch", {TRAIN_EPOCH: _FOUND}, "v.to("),
    ),
    patches=(Patch(TRAINER, _install),),
    process=Process.PARENT,
    why="Without a GPU, torch raises that there is no NVIDIA driver before the first step.",
    upstream="none: training on a CPU is nothing that speculators sets out to do",
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    stages=(Stage.TRAINING,),
)
