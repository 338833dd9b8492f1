"""Plain modules of the consumer's shape, for what adapters themselves do.

What shims do to the real ones is seen in the tests against a real engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from eagle3compat.patching import Ledger, Patcher
from eagle3compat.shim import GENERATOR, WORKER, all_shims

__all__ = ["GENERATOR", "WORKER", "Recorder", "carried_out", "module_with"]


class Recorder:
    """A callable that keeps how it was called.

    Args:
        answers: what the calls return, in order; the last one again and again.
    """

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers) or [None]
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the only call."""
        ((args, kwargs),) = self.calls
        assert args == ()
        return kwargs


def module_with(name: str, **attributes: Any) -> ModuleType:
    """A module of that name that holds just these attributes."""
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


@contextmanager
def carried_out(module: ModuleType, *ids: str) -> Iterator[Ledger]:
    """Install shims on a module in their declared order, and undo them at the end.

    Whatever a test looks at, it also finds out whether undoing leaves every namespace as it was.
    """
    before = _namespaces(module)
    ledger = Ledger()
    chosen = [shim for shim in all_shims() if shim.id in ids]
    assert {shim.id for shim in chosen} == set(ids)
    for shim in chosen:
        for patch in shim.patches:
            if patch.module == module.__name__:
                patch.install(module, Patcher(ledger, module, shim.id))
    assert ledger.live() == tuple(sorted(ids)), "a shim did nothing to this module"
    try:
        yield ledger
    finally:
        left_alone = ledger.undo()
    assert left_alone == ()
    after = _namespaces(module)
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def _namespaces(module: ModuleType) -> dict[tuple[str, str], Any]:
    """Every attribute of the module and of the classes in it."""
    owners: dict[str, Any] = {"": module}
    owners.update({name: each for name, each in vars(module).items() if isinstance(each, type)})
    return {
        (owner, name): value
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
        if name not in ("__dict__", "__weakref__")
    }
