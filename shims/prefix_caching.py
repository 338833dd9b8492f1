"""Turn prefix caching off: a cached prefix is not computed, so its states are not captured."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from eagle3compat.consumer_texts import CONFIGURE_030, CONFIGURE_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import all_of, known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_CONFIG = "vllm.config.CacheConfig"
_CALLER = "VllmHiddenStatesGenerator._create_vllm_config"
_LEFT_ON = Finding(Status.NEEDED, "prefix caching is left on, and requests have no block hasher")
_TURNED_OFF = Finding(Status.NOT_NEEDED, "the consumer turns it off itself")


def _can_be_turned_off(facts: Facts) -> Finding:
    calls = facts.calls(GENERATOR, _CONFIG)
    signature = facts.signature(_CONFIG)
    if not calls or signature is None or not signature.names("enable_prefix_caching"):
        return Finding(Status.DRIFT, f"{_CONFIG} is not called, or has no enable_prefix_caching")
    return _LEFT_ON


def _install(module: ModuleType, patcher: Patcher) -> None:
    patcher.add_argument(module, "CacheConfig", "enable_prefix_caching", False)


SHIM = Shim(
    id="prefix-caching",
    title="prefix caching off",
    contracts=(
        Contract(
            GENERATOR,
            _CALLER,
            _CONFIG,
            "every prompt token computed, and requests accepted without block hashes",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.11",
    probe=all_of(
        known_function(
            GENERATOR,
            _CALLER,
            {CONFIGURE_030: _LEFT_ON, CONFIGURE_040: _TURNED_OFF},
            "CacheConfig(",
        ),
        _can_be_turned_off,
    ),
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
