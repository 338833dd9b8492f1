"""Take a run up at the learning rate that it was left at."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import SET_UP_OPTIMIZER
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import TRAINER, Contract, Finding, Patch, Process, Shim, Stage, Status

_SET_UP = "Trainer.setup_optimizer"


def _install(module: ModuleType, patcher: Patcher) -> None:
    def setup_optimizer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        resumed = instance.resume_from_checkpoint and instance.checkpointer.previous_epoch != -1
        if instance.scheduler is None or not resumed:
            return
        rates = instance.scheduler.get_last_lr()
        for group, rate in zip(instance.opt.param_groups, rates, strict=True):
            group["lr"] = rate

    patcher.wrap(module.Trainer, "setup_optimizer", setup_optimizer)


SHIM = Shim(
    id="resumed-schedule",
    title="the learning rate of a resumed run's first step",
    contracts=(
        Contract(
            TRAINER,
            _SET_UP,
            "torch.optim.lr_scheduler.LambdaLR.load_state_dict",
            "an optimizer at the learning rate of the schedule that is loaded",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=None,
    probe=known_function(
        TRAINER,
        _SET_UP,
        {
            SET_UP_OPTIMIZER: Finding(
                Status.NEEDED, "the schedule is made with an epoch for a step, and loaded too late"
            )
        },
        "load_scheduler_state_dict(",
    ),
    patches=(Patch(TRAINER, _install),),
    process=Process.PARENT,
    why=(
        "A resumed run takes its first step at the rate of step number epoch, which lies in the "
        "warm-up; loading the schedule's state does not reach the optimizer."
    ),
    upstream="none: seen when a resumed run was compared with an undisturbed one",
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
    stages=(Stage.TRAINING,),
)
