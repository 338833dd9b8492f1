"""Carrying a plan out in this process: all of it or nothing, and exactly undone."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from eagle3compat import handshake, settled
from eagle3compat.errors import Eagle3CompatError
from eagle3compat.importing import ImportHook
from eagle3compat.patching import Ledger, Patcher
from eagle3compat.payload import ENVIRONMENT_VARIABLE, Payload
from eagle3compat.shim import GENERATOR, Patch, Shim, shim


class PatchError(Eagle3CompatError):
    """A replacement could not be made; the module concerned is not left half patched."""


class StaleReferenceWarning(UserWarning):
    """Something made before ``apply()`` still uses the consumer's unpatched code."""


@dataclass(frozen=True)
class Status:
    """What is live in this process.

    Args:
        applied: whether a plan is being carried out.
        shims: ids of the plan's shims.
        live: ids of shims whose replacements are in place in modules loaded so far.
        patched: modules patched so far.
        settled: what conditional shims chose, by id.
        stale: names elsewhere that hold earlier objects, and engines made before ``apply()``.
        displaced: places where somebody patched over a replacement of ours.
    """

    applied: bool
    shims: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    patched: tuple[str, ...] = ()
    settled: tuple[tuple[str, str], ...] = ()
    stale: tuple[str, ...] = ()
    displaced: tuple[str, ...] = ()


class _Session:
    """One payload being carried out."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.ledger = Ledger()
        self.old_engines: tuple[str, ...] = ()
        self._patches = _patches_by_module([shim(name) for name in payload.shims])
        self.hook = ImportHook(self._patches, self._executed)

    def start(self) -> None:
        """Watch imports and patch what is loaded; on failure leave everything as it was."""
        try:
            self.hook.install(self._loaded)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> tuple[str, ...]:
        """Undo everything; returns the places left alone."""
        self.hook.remove()
        return self.ledger.undo()

    def patched(self) -> tuple[str, ...]:
        return tuple(sorted({entry.module.__name__ for entry in self.ledger}))

    def _executed(self, module: ModuleType) -> None:
        with _lock:
            if self.hook.active:  # it may have been removed while this thread waited
                self.ledger.forget(module)
                self._patch(module)

    def _loaded(self, module: ModuleType) -> None:
        if not self.ledger.has(module):
            self.old_engines += _engines_of(module, but_for=self.payload)
            self._patch(module)

    def _patch(self, module: ModuleType) -> None:
        self._check_origin(module)
        for shim_id, patch in self._patches[module.__name__]:
            try:
                patch.install(module, Patcher(self.ledger, module, shim_id))
            except Exception as error:
                self.ledger.undo(module)
                raise PatchError(
                    f"{module.__name__}: shim {shim_id} could not be installed "
                    f"({type(error).__name__}: {error}); the module is not usable while "
                    f"eagle3compat is applied. Run verify-patches, or restore() first."
                ) from error

    def _check_origin(self, module: ModuleType) -> None:
        folder = self.payload.consumer_dir
        origin = getattr(module, "__file__", None)
        if origin is None or not Path(origin).resolve().is_relative_to(Path(folder).resolve()):
            raise PatchError(
                f"{module.__name__}: expected the copy in {folder}, for which the plan was made; "
                f"found {origin}. Call apply() after sys.path is as it will stay."
            )
        found = getattr(sys.modules.get("vllm"), "__file__", None)
        expected = self.payload.provider_dir
        if not expected or found is None:
            return
        if Path(found).resolve().parent != Path(expected).resolve():
            raise PatchError(
                f"{module.__name__}: the plan was made for the vLLM in {expected}, but the one in "
                f"{found} is loaded. Call apply() after sys.path is as it will stay, and give "
                "workers the same."
            )


_lock = threading.RLock()
_session: _Session | None = None

# A lock held across a fork would never be released in the child. The lock is held for short
# stretches that wait for nothing, and import nothing but wrapt.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def start(payload: Payload) -> None:
    """Carry a payload out in this process and pass it on to its children.

    Raises:
        PatchError: a replacement failed; everything is as it was before.
    """
    global _session
    session = _Session(payload)
    with _lock:
        if _session is not None:
            if _session.payload.same_plan(payload):
                # Forked since, or the environment was changed: children look for this process.
                _session.payload = payload
                os.environ[ENVIRONMENT_VARIABLE] = payload.to_json()
                return
            raise PatchError(
                "apply(): a plan with other shims is being carried out in this process already; "
                "call restore() first."
            )
        if payload.shims:
            session.start()
        # Without shims too: a process further up may have left another plan there.
        os.environ[ENVIRONMENT_VARIABLE] = payload.to_json()
        _session = session
    stale = session.ledger.stale() + session.old_engines
    if stale:
        try:
            warnings.warn(
                "made before apply(), and not reached by it: " + "; ".join(stale),
                StaleReferenceWarning,
                stacklevel=3,
            )
        except StaleReferenceWarning:  # where warnings are errors
            stop()
            raise


def stop() -> tuple[str, ...]:
    """Undo what ``start`` did; returns the places left alone, and engines that still live."""
    global _session
    with _lock:
        if _session is None:
            return ()
        left_alone = _session.stop()
        os.environ.pop(ENVIRONMENT_VARIABLE, None)
        settled.forget()
        _session = None
    generator = sys.modules.get(GENERATOR)
    return left_alone + (_engines_of(generator) if generator is not None else ())


def current() -> Payload | None:
    """The payload that is being carried out in this process, or None."""
    with _lock:
        return None if _session is None else _session.payload


def status() -> Status:
    """What is live in this process."""
    with _lock:
        if _session is None:
            return Status(applied=False)
        ledger = _session.ledger
        return Status(
            applied=True,
            shims=_session.payload.shims,
            live=ledger.live(),
            patched=_session.patched(),
            settled=tuple(sorted(settled.choices().items())),
            stale=ledger.stale() + _session.old_engines,
            displaced=ledger.displaced(),
        )


def _patches_by_module(shims: Iterable[Shim]) -> dict[str, list[tuple[str, Patch]]]:
    patches: dict[str, list[tuple[str, Patch]]] = {}
    for record in shims:
        for patch in record.patches:
            patches.setdefault(patch.module, []).append((record.id, patch))
    if patches:
        for patch in handshake.PATCHES:
            patches.setdefault(patch.module, []).append((handshake.ID, patch))
    return patches


def _engines_of(module: ModuleType, but_for: Payload | None = None) -> tuple[str, ...]:
    """Generators that live now: their engines keep the code that they were made with.

    Args:
        module: the consumer's generator module; others have none.
        but_for: leave out those that were made under this plan.
    """
    generator = vars(module).get("VllmHiddenStatesGenerator")
    if not isinstance(generator, type):
        return ()
    return tuple(
        f"a live {kind.__name__} at {id(thing):#x}"
        for kind in dict.fromkeys(_with_subclasses(generator))
        for thing in gc.get_referrers(kind)
        if type(thing) is kind and not (but_for and handshake.made_under(thing, but_for))
    )


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)
