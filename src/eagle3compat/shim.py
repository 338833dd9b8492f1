"""The record of a shim, and the registry that loads the modules of ``eagle3compat.shims``.

A shim repairs one broken contract between the consumer (speculators) and a provider (vLLM,
transformers, torch). Its record documents it, its probe decides from source text whether it is
needed, and its patches carry it out. This module needs the standard library alone, since workers
load shims too.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3compat.facts import Facts
    from eagle3compat.patching import Patcher

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
WORKER = "speculators.data_generation.custom_worker"
DRAFT_MODEL = "speculators.models.eagle3.core"
CHECKPOINTER = "speculators.train.checkpointer"
TRAINER = "speculators.train.trainer"


class Process(enum.Enum):
    """The processes in which a shim's patches are carried out."""

    PARENT = "parent"
    WORKER = "worker"
    BOTH = "both"

    @property
    def in_parent(self) -> bool:
        return self is not Process.WORKER

    @property
    def in_worker(self) -> bool:
        return self is not Process.PARENT


class Stage(enum.Enum):
    """What shims serve: each stage has a plan of its own, and neither waits for the other's."""

    EXTRACTION = "extraction"
    TRAINING = "training"


class Status(enum.Enum):
    """What a plan says of one shim."""

    NEEDED = "needed"
    NOT_NEEDED = "not needed"
    DRIFT = "drift"
    OFF = "off"


@dataclass(frozen=True)
class Contract:
    """What one call site of the consumer needs of a provider.

    Args:
        consumer: module of the call site.
        within: qualified name of the consumer's function that holds the call site.
        provider: dotted name of the provider's symbol.
        needs: the need, in words.
    """

    consumer: str
    within: str
    provider: str
    needs: str


@dataclass(frozen=True)
class Finding:
    """What a probe found in the source text.

    Args:
        status: needed, not needed, or drift when text cannot tell or shows an unknown shape.
        reason: what was seen, in words.
        conditional: what text cannot tell; the process that knows settles it before the first
            step. None when text settled everything.
        line: line of the call site in the consumer's module, where one was found.
    """

    status: Status
    reason: str
    conditional: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Patch:
    """One replacement: ``install`` is called with the loaded module and a patcher.

    ``install`` imports nothing: it runs while the consumer's module is being imported.
    """

    module: str
    install: Callable[[ModuleType, Patcher], None]


@dataclass(frozen=True)
class Shim:
    """One repair.

    Args:
        id: name used on the command line, in plans and in environment variables.
        title: the repair in a few words.
        contracts: the contracts that it mends.
        consumers: speculators releases in whose code the fault is, as a version specifier.
        expected: vLLM releases on which it is expected to be needed, as a version specifier; None
            for a shim of training alone, where no vLLM takes part.
        transformers: transformers releases on which it is, where those decide; None elsewhere.
        probe: decides from facts.
        patches: the replacements.
        process: where they are carried out.
        why: why the shim exists.
        upstream: link to the upstream change or report, or why there is none.
        mended_in: the version that mends it, or why none does.
        remove_when: when this shim can be deleted.
        touches_provider: the reason, for a shim that changes a provider's module.
        silent: the fault raises nothing and makes wrong numbers.
        after: ids of shims that rebind the same name and come first.
        stages: what it serves.
    """

    id: str
    title: str
    contracts: tuple[Contract, ...]
    consumers: str
    expected: str | None
    probe: Callable[[Facts], Finding]
    patches: tuple[Patch, ...]
    process: Process
    why: str
    upstream: str
    mended_in: str
    remove_when: str
    touches_provider: str | None = None
    transformers: str | None = None
    silent: bool = False
    after: tuple[str, ...] = field(default=())
    stages: tuple[Stage, ...] = (Stage.EXTRACTION,)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its patches change, each once, in order."""
        return tuple(dict.fromkeys(patch.module for patch in self.patches))


@cache
def all_shims() -> tuple[Shim, ...]:
    """Every shim, in the order in which patches of one name are applied."""
    package = importlib.import_module("eagle3compat.shims")
    records: dict[str, Shim] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        shim: Shim = importlib.import_module(f"eagle3compat.shims.{name}").SHIM
        records[shim.id] = shim
    return tuple(_in_order(records))


def shim(shim_id: str) -> Shim:
    """The shim of that id; raises ``KeyError`` with the ids there are."""
    for record in all_shims():
        if record.id == shim_id:
            return record
    known = ", ".join(record.id for record in all_shims())
    raise KeyError(f"no shim is called {shim_id!r}; there are {known}")


def _in_order(records: dict[str, Shim]) -> list[Shim]:
    ordered: dict[str, Shim] = {}

    def place(record: Shim, path: tuple[str, ...]) -> None:
        if record.id in path:
            raise ValueError(f"shims wait for each other: {' -> '.join((*path, record.id))}")
        for earlier in record.after:
            place(records[earlier], (*path, record.id))
        ordered.setdefault(record.id, record)

    for record in records.values():
        place(record, ())
    return list(ordered.values())
