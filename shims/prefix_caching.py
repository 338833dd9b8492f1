"""Turn prefix caching off: a cached prefix is not computed, so its states are not captured."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from eagle3compat.patching import Patcher
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_CONFIG = "vllm.config.CacheConfig"


def _probe(facts: Facts) -> Finding:
    calls = facts.calls(GENERATOR, _CONFIG)
    signature = facts.signature(_CONFIG)
    if not calls or signature is None or not signature.names("enable_prefix_caching"):
        return Finding(Status.DRIFT, f"{_CONFIG} is not called, or has no enable_prefix_caching")
    if all("enable_prefix_caching" in call.keywords for call in calls):
        return Finding(Status.NOT_NEEDED, "the consumer turns it off itself", None, calls[0].line)
    return Finding(
        Status.NEEDED,
        "prefix caching is left on, and requests have no block hasher",
        None,
        calls[0].line,
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    patcher.add_argument(module, "CacheConfig", "enable_prefix_caching", False)


SHIM = Shim(
    id="prefix-caching",
    title="prefix caching off",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator._create_vllm_config",
            _CONFIG,
            "every prompt token computed, and requests accepted without block hashes",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why=(
        "vLLM turns prefix caching on by default. A prompt of a block or more, without block "
        "hashes, is a bare AssertionError in its block pool; with them, shared prefixes would "
        "lose their rows."
    ),
    upstream="https://github.com/vllm-project/speculators/pull/283 (turns it off)",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
)
