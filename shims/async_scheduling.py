"""Keep vLLM's scheduler synchronous: the generator drives the executor by hand."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from eagle3compat.consumer_texts import CONFIGURE_030, CONFIGURE_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import all_of, known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_CONFIG = "vllm.config.SchedulerConfig"
_CALLER = "VllmHiddenStatesGenerator._create_vllm_config"
_LEFT = Finding(Status.NEEDED, "async_scheduling is left to vLLM's own choice")


def _probe(facts: Facts) -> Finding:
    calls = facts.calls(GENERATOR, _CONFIG)
    signature = facts.signature(_CONFIG)
    if not calls or signature is None:
        return Finding(Status.DRIFT, f"no call, or no signature, of {_CONFIG} to be read")
    if not signature.names("async_scheduling"):
        return Finding(
            Status.NOT_NEEDED, "the scheduler config has no async_scheduling", None, calls[0].line
        )
    return replace(_LEFT, line=calls[0].line)


def _install(module: ModuleType, patcher: Patcher) -> None:
    patcher.add_argument(module, "SchedulerConfig", "async_scheduling", False)


SHIM = Shim(
    id="async-scheduling",
    title="asynchronous scheduling off",
    contracts=(
        Contract(
            GENERATOR,
            _CALLER,
            _CONFIG,
            "steps that are complete when execute_model returns",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=all_of(
        _probe,
        known_function(
            GENERATOR, _CALLER, {CONFIGURE_030: _LEFT, CONFIGURE_040: _LEFT}, "SchedulerConfig("
        ),
    ),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="Off the CPU, vLLM turns it on by default; results then arrive as asynchronous handles.",
    upstream="https://github.com/vllm-project/vllm/pull/27614 (turned on by default)",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
)
