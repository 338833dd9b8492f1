"""All shims at once: none drops what an earlier one put in the same place."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt
from standins import GENERATOR, WORKER, carried_out, module_with

from eagle3compat.shim import all_shims


def _of_the_consumers_shape(name: str) -> ModuleType:
    """A stand-in with every name that any shim touches."""

    def method(self: Any = None, *args: Any, **kwargs: Any) -> None: ...

    def from_groups(vllm_config: Any, kv_cache_groups: Any, available_memory: Any) -> None: ...

    generator_methods = ("generate", "_create_vllm_config", "_setup_capture")
    extension_methods = (
        "_setup_hidden_states_capture",
        "_reset_capture",
        "_store_captured_states",
        "_get_captured_states",
    )
    classes = ("Scheduler", "MultiprocExecutor", "Request", "AutoTokenizer")
    configs = ("VllmConfig", "SchedulerConfig", "CacheConfig", "ModelConfig", "ParallelConfig")
    return module_with(
        name,
        torch=module_with("torch", cuda=module_with("torch.cuda"), float16=object()),
        RequestStatus=SimpleNamespace(FINISHED_ABORTED=object()),
        VllmHiddenStatesGenerator=type("Generator", (), dict.fromkeys(generator_methods, method)),
        HiddenStatesWorkerExtension=type("Extension", (), dict.fromkeys(extension_methods, method)),
        _patched_forward=method,
        get_tp_group=method,
        get_kv_cache_config_from_groups=from_groups,
        **{name: type(name, (), {}) for name in (*classes, *configs)},
    )


@pytest.mark.parametrize("name", [GENERATOR, WORKER])
def test_what_comes_later_stands_on_what_came_earlier(name: str) -> None:
    ids = [record.id for record in all_shims() if name in record.modules]
    before: dict[tuple[int, str], Any] = {}
    with carried_out(_of_the_consumers_shape(name), *ids) as ledger:
        for entry in ledger:
            earlier = before.get((id(entry.owner), entry.name))
            assert earlier is None or _stands_on(entry.replacement, earlier), (
                f"{entry.shim_id} drops what another shim put at {entry.place}: "
                "declare the order, with the one that replaces first"
            )
            before[id(entry.owner), entry.name] = entry.replacement
    assert len(before) > 1


def _stands_on(later: Any, earlier: Any) -> bool:
    if isinstance(later, wrapt.FunctionWrapper):
        return bool(later.__wrapped__ is earlier)
    return isinstance(later, type) and issubclass(later, earlier)
