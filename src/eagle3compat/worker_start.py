"""Spawns the workers where a forked one could not use the GPU.

Imported before vLLM, speculators asks torch for a GPU (0.4), or has it compile (0.3), which asks
too. The count of the devices starts the driver: a fork cannot use CUDA any more. vLLM sees that
CUDA is not initialized yet, and forks its workers all the same: ``Cannot re-initialize CUDA in
forked subprocess``. vLLM imported first has torch ask NVML, which leaves the driver alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.settled import settle

NOTE = "worker-start"
"""Under which name ``status()`` tells that workers are spawned."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's own variable: ``fork``, its default, or ``spawn``, which its CPU platform sets."""

GROUP, PLUGIN = "vllm.general_plugins", "eagle3compat.plugin"


def lost_in_fork(torch: ModuleType) -> bool:
    """Whether CUDA could not be used in a fork of this process.

    torch knows it in the fork alone, so this makes one. A torch that cannot tell counts as lost.
    """
    child = os.fork()
    if child == 0:
        # Nothing of the parent may run on in here, no exception and no exit handler.
        try:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def check_entry_point() -> None:
    """Refuse where vLLM would not find our plugin: a spawned worker has no other way to us.

    Raises:
        Refusal: this package is on the path, but not installed.
    """
    from importlib import metadata  # brings much along, and `apply()` is to be quick

    if any(found.module == PLUGIN for found in metadata.entry_points(group=GROUP)):
        return
    raise Refusal(
        "vllm/plugins/__init__.py:load_plugins_by_group",
        f"an entry point of eagle3compat in the group {GROUP}",
        "none",
        "Install eagle3compat into this environment; on PYTHONPATH alone it does not reach vLLM's "
        "workers.",
    )


@contextmanager
def spawning() -> Iterator[None]:
    """While it lasts, vLLM spawns its workers; status tells."""
    before = os.environ.get(METHOD)
    os.environ[METHOD] = "spawn"
    settle(NOTE, "workers are spawned: CUDA was asked for before, and a fork could not use it")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(METHOD, None)
        else:
            os.environ[METHOD] = before


def install(module: ModuleType, patcher: Patcher) -> None:
    """Have the generator's executor find out how its workers can start, when it is made."""
    torch = module.torch

    def derive(base: Any) -> type:
        class ExecutorWhoseWorkersReachTheGpu(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                if os.environ.get(METHOD) == "spawn":
                    check_entry_point()
                    super().__init__(*args, **kwargs)
                elif lost_in_fork(torch):
                    check_entry_point()
                    with spawning():
                        super().__init__(*args, **kwargs)
                else:
                    super().__init__(*args, **kwargs)

        return ExecutorWhoseWorkersReachTheGpu

    patcher.extend(module, "MultiprocExecutor", derive)
