"""Return results in the order of the inputs, not in that of request ids sorted as text."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from eagle3compat.consumer_texts import GENERATE_030, GENERATE_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status
from eagle3compat.shims.request_order import input_index


def by_index(request_ids: Iterable[str]) -> list[str]:
    """Request ids req_<call>_<index> in the order of their index."""
    return sorted(request_ids, key=input_index)


def _install(module: ModuleType, patcher: Patcher) -> None:
    # The generator module calls sorted() for its request ids alone.
    patcher.replace(module, "sorted", by_index)


SHIM = Shim(
    id="input-order",
    title="results come in the order of the inputs",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            "builtins.sorted",
            "request ids that sort as text as their numbers do",
        ),
    ),
    consumers=">=0.4.0,<0.5",
    expected=">=0.11",
    probe=known_function(
        GENERATOR,
        "VllmHiddenStatesGenerator.generate",
        {
            GENERATE_030: Finding(Status.NOT_NEEDED, "results are made in the order of the inputs"),
            GENERATE_040: Finding(Status.NEEDED, "request ids are sorted as text"),
        },
        "sorted(request_id_to_idx",
    ),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="req_0_10 sorts before req_0_2: from 11 requests on, results belong to other inputs.",
    upstream="none: the generator was removed in speculators 0.5.0 before it was reported",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
)
