"""Give the layers in the order in which they were asked for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import SET_UP_030, SET_UP_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import WORKER, Contract, Finding, Patch, Process, Shim, Status

_FOUND = Finding(Status.NEEDED, "layer ids are kept as a frozenset and come in ascending order")


def in_asked_order(layer_ids: list[int], states: list[Any]) -> list[Any]:
    """Reorder ``states``, given in ascending layer order, to the order of ``layer_ids``."""
    ascending = sorted(layer_ids)
    return [states[ascending.index(layer_id)] for layer_id in layer_ids]


def _install(module: ModuleType, patcher: Patcher) -> None:
    def set_up(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        instance._asked_layer_ids = list(kwargs["layer_ids"] if kwargs else args[0])

    def collect(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        states = wrapped(*args, **kwargs)
        if states is None:
            return None
        asked = instance._asked_layer_ids
        if isinstance(states, dict):  # speculators 0.4 answers by request
            return {name: in_asked_order(asked, layers) for name, layers in states.items()}
        return in_asked_order(asked, states)

    extension = module.HiddenStatesWorkerExtension
    patcher.wrap(extension, "_setup_hidden_states_capture", set_up)
    patcher.wrap(extension, "_get_captured_states", collect)


SHIM = Shim(
    id="layer-order",
    title="layers come in the order asked for",
    contracts=(
        Contract(
            WORKER,
            "HiddenStatesWorkerExtension._setup_hidden_states_capture",
            "torch.cat",
            "layer ids asked for in ascending order",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=known_function(
        WORKER,
        "HiddenStatesWorkerExtension._setup_hidden_states_capture",
        {SET_UP_030: _FOUND, SET_UP_040: _FOUND},
        "frozenset(layer_ids)",
    ),
    patches=(Patch(WORKER, _install),),
    process=Process.WORKER,
    why="States come in ascending layer order whatever was asked for.",
    upstream="none: the generator was removed in speculators 0.5.0 before it was reported",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
    after=("request-order",),
)
