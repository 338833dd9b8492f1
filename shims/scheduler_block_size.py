"""Give vLLM's scheduler the block size of the KV cache, which became a parameter."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.patching import Patcher
from eagle3compat.probes import call_binds
from eagle3compat.shim import GENERATOR, Contract, Patch, Process, Shim

_TARGET = "vllm.v1.core.sched.scheduler.Scheduler"


def _install(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class SchedulerWithBlockSize(base):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
                kwargs.setdefault("block_size", vllm_config.cache_config.block_size)
                super().__init__(vllm_config, *args, **kwargs)

        return SchedulerWithBlockSize

    patcher.extend(module, "Scheduler", derive)


SHIM = Shim(
    id="scheduler-block-size",
    title="Scheduler gets the KV cache's block size",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.__init__",
            _TARGET,
            "a scheduler without a parameter block_size",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.11.2",
    probe=call_binds(GENERATOR, _TARGET, add=("block_size",)),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="A TypeError says that block_size is missing.",
    upstream="https://github.com/vllm-project/speculators/pull/225 (follows vLLM 0.12)",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
)
