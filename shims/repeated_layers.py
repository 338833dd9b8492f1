"""Refuse repeated layer ids before the engine starts: the worker keeps them as a set."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import SET_UP_030, SET_UP_040
from eagle3compat.errors import InputError
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, WORKER, Contract, Finding, Patch, Process, Shim, Status

_FOUND = Finding(Status.NEEDED, "layer ids are kept as a frozenset")


def check_distinct(layer_ids: Sequence[int]) -> None:
    """Raise ``InputError`` when a layer id is repeated."""
    repeated = sorted({layer for layer in layer_ids if list(layer_ids).count(layer) > 1})
    if repeated:
        raise InputError(
            f"layer_ids: expected each layer once, found {list(layer_ids)}, which repeats "
            f"{', '.join(map(str, repeated))}. Name the layers: the default ones coincide in "
            "models of few layers."
        )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def configure(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        check_distinct(instance.layer_ids)
        return wrapped(*args, **kwargs)

    patcher.wrap(module.VllmHiddenStatesGenerator, "_create_vllm_config", configure)


SHIM = Shim(
    id="repeated-layers",
    title="repeated layer ids are refused",
    contracts=(
        Contract(
            WORKER,
            "HiddenStatesWorkerExtension._setup_hidden_states_capture",
            f"{GENERATOR}.VllmHiddenStatesGenerator.layer_ids",
            "distinct layer ids",
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
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="A repeated layer is dropped, and the sample has fewer layers than were asked for.",
    upstream="none: the generator was removed in speculators 0.5.0 before it was reported",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
)
