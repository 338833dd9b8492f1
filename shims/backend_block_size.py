"""Let vLLM choose the KV cache's block size for the attention backend it runs."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.settled import settle
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "backend-block-size"
_CONFIG = "vllm.config.CacheConfig"
_CACHE = "vllm.config.cache"
_PLATFORM = "vllm.platforms.interface"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


def _probe(facts: Facts) -> Finding:
    calls = [call for call in facts.calls(GENERATOR, _CONFIG) if "block_size" in call.keywords]
    if not calls:
        return Finding(Status.NOT_NEEDED, "the consumer leaves the block size to vLLM")
    line = calls[0].line
    signature = facts.signature(_SCHEDULER)
    cache, platform = facts.source_text(_CACHE), facts.source_text(_PLATFORM)
    if cache is None or platform is None or signature is None:
        return Finding(Status.DRIFT, f"no text of {_CACHE} or {_PLATFORM}", None, line)
    # What chooses a size for the backend passes over one that was asked for.
    kept = {"user_specified_block_size" in cache, "def update_block_size_for_backend(" in platform}
    if kept == {False}:
        return Finding(
            Status.NOT_NEEDED, "vLLM corrects a block size that its backend cannot take", None, line
        )
    if kept != {True}:
        return Finding(
            Status.DRIFT, "cannot tell whether a block size asked for is kept", None, line
        )
    if not signature.takes("kv_cache_config") or not signature.takes("block_size"):
        return Finding(Status.DRIFT, f"{_SCHEDULER} takes no block size to be set", None, line)
    return Finding(
        Status.NEEDED,
        "a block size that is asked for is kept, whether the backend can take it or not",
        "the attention backend's block sizes; vLLM chooses, and the KV cache's groups tell",
        line,
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class SchedulerWithBackendsBlockSize(base):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, kv_cache_config: Any, **kwargs: Any) -> None:
                groups = kv_cache_config.kv_cache_groups
                size = min(group.kv_cache_spec.block_size for group in groups)
                settle(_ID, f"{size} tokens a block")
                vllm_config.cache_config.block_size = size
                super().__init__(
                    vllm_config=vllm_config,
                    kv_cache_config=kv_cache_config,
                    **kwargs | {"block_size": size},
                )

        return SchedulerWithBackendsBlockSize

    patcher.drop_argument(module, "CacheConfig", "block_size")
    patcher.extend(module, "Scheduler", derive)


SHIM = Shim(
    id=_ID,
    title="the backend's block size instead of 16",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator._create_vllm_config",
            _CONFIG,
            "a block size of 16 that every attention backend takes, or that vLLM corrects",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.18",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why=(
        "From vLLM 0.18 on, a block size that is asked for is not corrected. Backends that need "
        "another raise: No common block size for 16 (the CPU's from 0.29 on)."
    ),
    upstream="https://github.com/vllm-project/vllm/pull/35122 (keeps a size that is asked for)",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    after=("scheduler-block-size", "finished-requests"),
)
