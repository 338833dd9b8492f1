"""Call get_kv_cache_config_from_groups with the parameters that it has, in both directions."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from eagle3compat.patching import Patcher
from eagle3compat.probes import call_binds
from eagle3compat.shim import GENERATOR, Contract, Patch, Process, Shim

_NAME = "get_kv_cache_config_from_groups"
_TARGET = f"vllm.v1.core.kv_cache_utils.{_NAME}"


def _install(module: ModuleType, patcher: Patcher) -> None:
    takes_specs = "kv_cache_specs" in inspect.signature(getattr(module, _NAME)).parameters

    def with_specs(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        specs = {
            layer: group.kv_cache_spec
            for group in kwargs["kv_cache_groups"]
            for layer in group.layer_names
        }
        return wrapped(*args, **{"kv_cache_specs": specs} | kwargs)

    if takes_specs:
        patcher.wrap(module, _NAME, with_specs)
    else:
        patcher.drop_argument(module, _NAME, "kv_cache_specs")


SHIM = Shim(
    id="kv-cache-groups",
    title="KV cache groups called with the parameters there are",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.__init__",
            _TARGET,
            "its parameter kv_cache_specs, or its absence",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.12",
    probe=call_binds(GENERATOR, _TARGET, drop=("kv_cache_specs",), add=("kv_cache_specs",)),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="The parameter kv_cache_specs was removed from vLLM: a TypeError either way.",
    upstream="https://github.com/vllm-project/speculators/pull/225 (follows vLLM 0.12)",
    mended_in="speculators 0.4.0 (for vLLM from 0.12 on)",
    remove_when="speculators 0.3 is no longer supported",
)
