"""Resolve the KV cache's layout, which vLLM's engine core does where the generator is its own."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.settled import settle
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "kv-cache-layout"
_EXECUTOR = "vllm.v1.executor.multiproc_executor.MultiprocExecutor"
_CONFIG = "vllm.config.CacheConfig"
_RESOLVE = "vllm.v1.attention.backends.utils.resolve_kv_cache_layout"
_PARAMETERS = ("vllm_config", "supported_layouts", "kv_cache_specs")


def _probe(facts: Facts) -> Finding:
    resolved = facts.has_member(_EXECUTOR, "set_kv_cache_layout")
    if resolved is None:
        return Finding(Status.DRIFT, f"cannot tell what {_EXECUTOR} has")
    if not resolved:
        return Finding(Status.NOT_NEEDED, "the layout needs no resolving by the engine core")
    signature = facts.signature(_RESOLVE)
    if signature is None or tuple(each.name for each in signature.parameters) != _PARAMETERS:
        return Finding(Status.DRIFT, f"{_RESOLVE} does not take {', '.join(_PARAMETERS)}")
    if not facts.has_member(_EXECUTOR, "get_supported_kv_cache_layouts"):
        return Finding(Status.DRIFT, f"{_EXECUTOR} has no get_supported_kv_cache_layouts")
    return Finding(Status.NEEDED, "the layout is unresolved until the engine core resolves it")


def _install(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class ExecutorThatResolvesTheLayout(base):  # type: ignore[misc]
            def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
                reply = super().collective_rpc(method, *args, **kwargs)
                if method == "get_kv_cache_spec":
                    _resolve(self, [spec for worker in reply for spec in worker.values()])
                return reply

        return ExecutorThatResolvesTheLayout

    patcher.extend(module, "MultiprocExecutor", derive)


def _resolve(executor: Any, specs: list[Any]) -> None:
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    supported = executor.get_supported_kv_cache_layouts()
    layout = resolve_kv_cache_layout(executor.vllm_config, supported, specs)
    settle(_ID, layout.name)
    executor.set_kv_cache_layout(layout.name)


SHIM = Shim(
    id=_ID,
    title="KV cache layout resolved",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.__init__",
            f"{_CONFIG}.get_resolved_kv_cache_layout",
            "a layout that is settled without the engine core",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.29",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="ValueError: KV cache layout has not been resolved yet.",
    upstream="https://github.com/vllm-project/vllm/pull/51718 (one place resolves the layout)",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    after=("two-phase-step", "unique-reply"),
)
