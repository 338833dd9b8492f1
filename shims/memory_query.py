"""Size the KV cache where there is no GPU to be asked for its free memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher, overlaid
from eagle3compat.settled import settle
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "memory-query"
_GIB = 1 << 30
_SOURCES = ("torch.cuda.mem_get_info", "speculators.utils.util.mem_get_info")


def _probe(facts: Facts) -> Finding:
    for source in _SOURCES:
        for call in facts.calls(GENERATOR, source):
            return Finding(
                Status.NEEDED,
                f"{source} answers for a GPU alone",
                "whether there is a GPU; settled when the KV cache is sized",
                call.line,
            )
    return Finding(Status.DRIFT, f"none of {', '.join(_SOURCES)} is called")


def free_memory() -> tuple[int, int]:
    """Bytes that the KV cache may be sized from on a CPU, and the host's memory in bytes.

    ``VLLM_CPU_KVCACHE_SPACE`` (GiB), vLLM's own limit on a CPU, caps the first.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    limit = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 0) * _GIB)
    return (min(free, limit) if limit else free), total


def _query(ask_the_gpu: Callable[..., tuple[int, int]], available: bool) -> tuple[int, int]:
    if available:
        settle(_ID, "a GPU was asked")
        return ask_the_gpu()
    settle(_ID, "no GPU: the host's memory")
    return free_memory()


def _install(module: ModuleType, patcher: Patcher) -> None:
    torch = module.torch

    def ask_cuda() -> tuple[int, int]:
        return _query(torch.cuda.mem_get_info, torch.cuda.is_available())

    def mem_get_info(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        # speculators 0.4 asks an NPU itself where there is one.
        return _query(wrapped, torch.cuda.is_available() or module.is_npu_available())

    if hasattr(module, "mem_get_info"):
        patcher.wrap(module, "mem_get_info", mem_get_info)
    else:
        cuda = overlaid(torch.cuda, mem_get_info=ask_cuda)
        patcher.replace(module, "torch", overlaid(torch, cuda=cuda))


SHIM = Shim(
    id=_ID,
    title="free memory asked of the device there is",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.__init__",
            "torch.cuda.mem_get_info",
            "free memory in bytes",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="Without a GPU, torch raises that there is no NVIDIA driver, or answers 0 of 0 bytes.",
    upstream="https://github.com/vllm-project/speculators/pull/232 (asks an NPU, not a CPU)",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
)
