"""The ledger: what was replaced by whom in this process, and its exact undo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

_ABSENT = object()


class _LoadedModules:
    """``sys.modules`` as a namespace: the ledger can add a module there and take it away."""

    def __init__(self) -> None:
        self.__dict__ = sys.modules


LOADED_MODULES = _LoadedModules()


@dataclass(frozen=True)
class Replacement:
    """One attribute that was replaced.

    Args:
        module: the module whose patch this belongs to.
        owner: the module or class whose attribute it is.
        name: the attribute.
        original: its own earlier value, or a mark when it had none (inherited, or new).
        replacement: what stands there now.
        shim_id: the shim that did it.
    """

    module: ModuleType
    owner: Any
    name: str
    original: Any
    replacement: Any
    shim_id: str

    @property
    def place(self) -> str:
        """``module.attribute`` or ``module.Class.attribute``, for people."""
        if isinstance(self.owner, _LoadedModules):
            return f"sys.modules[{self.name!r}]"
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"


class Ledger:
    """Every replacement of this process, in the order made. Not thread-safe: callers lock."""

    def __init__(self) -> None:
        self._replacements: list[Replacement] = []

    def __iter__(self) -> Any:
        return iter(tuple(self._replacements))

    def replace(self, module: ModuleType, owner: Any, name: str, new: Any, shim_id: str) -> None:
        """Set ``owner.name`` to ``new`` and remember what its own namespace held."""
        original = vars(owner).get(name, _ABSENT)
        setattr(owner, name, new)
        self._replacements.append(Replacement(module, owner, name, original, new, shim_id))

    def has(self, module: ModuleType) -> bool:
        """Whether anything of that very module object was replaced."""
        return any(entry.module is module for entry in self._replacements)

    def live(self) -> tuple[str, ...]:
        """The ids of shims with replacements in this process, sorted."""
        return tuple(sorted({entry.shim_id for entry in self._replacements}))

    def displaced(self) -> tuple[str, ...]:
        """Places where somebody patched over a replacement of ours."""
        latest = {(id(entry.owner), entry.name): entry for entry in self._replacements}
        return tuple(
            entry.place
            for entry in latest.values()
            if vars(entry.owner).get(entry.name, _ABSENT) is not entry.replacement
        )

    def forget(self, module: ModuleType) -> None:
        """Undo what is left in a module whose code has just run anew (a reload).

        Most of it the code itself has set anew. Classes of before are none of the module's any
        more and stay patched, for those who hold them.
        """
        self._undo(lambda entry: entry.module is module and not isinstance(entry.owner, type))

    def undo(self, module: ModuleType | None = None) -> tuple[str, ...]:
        """Undo every replacement, or those of one module, latest first.

        Returns:
            The places left alone because somebody patched over them since.
        """
        return self._undo(lambda entry: module is None or entry.module is module)

    def _undo(self, concerned: Callable[[Replacement], bool]) -> tuple[str, ...]:
        left_alone: dict[tuple[int, str], str] = {}
        kept: list[Replacement] = []
        for entry in reversed(self._replacements):
            if not concerned(entry):
                kept.append(entry)
                continue
            key = (id(entry.owner), entry.name)
            if key in left_alone:
                continue
            if vars(entry.owner).get(entry.name, _ABSENT) is not entry.replacement:
                left_alone[key] = entry.place
            elif entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)
        self._replacements = kept[::-1]
        return tuple(left_alone.values())

    def stale(self) -> tuple[str, ...]:
        """Names elsewhere that still hold what a replacement took the place of.

        Only objects that the patched module itself defined count: that another module holds the
        provider's own class is how things should be.
        """
        replaced = {
            id(entry.original): entry
            for entry in self._replacements
            if isinstance(entry.original, FunctionType | type)
            and entry.original.__module__ == entry.module.__name__
        }
        if not replaced:
            return ()
        found = []
        for module_name, module in tuple(sys.modules.items()):
            if not isinstance(module, ModuleType):
                continue
            for name, value in tuple(vars(module).items()):
                entry = replaced.get(id(value))
                if entry is not None and module is not entry.owner:
                    found.append(f"{module_name}.{name} (earlier {entry.place})")
        return tuple(sorted(found))


class Patcher:
    """What a shim's ``install`` works with: replacements booked under its id."""

    def __init__(self, ledger: Ledger, module: ModuleType, shim_id: str) -> None:
        self._ledger = ledger
        self._module = module
        self._shim_id = shim_id

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set ``owner.name`` to ``new``."""
        self._ledger.replace(self._module, owner, name, new, self._shim_id)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Wrap the callable at ``owner.name``; ``wrapper(wrapped, instance, args, kwargs)``."""
        import wrapt  # here, since it brings asyncio along, and most processes patch nothing

        self.replace(owner, name, wrapt.FunctionWrapper(_own_or_inherited(owner, name), wrapper))

    def extend(self, owner: Any, name: str, derive: Callable[[type], type]) -> None:
        """Rebind the class at ``owner.name`` to a subclass of it, made by ``derive``."""
        base = getattr(owner, name)
        derived = derive(base)
        derived.__name__, derived.__qualname__ = base.__name__, base.__qualname__
        derived.__module__ = base.__module__
        self.replace(owner, name, derived)

    def add_argument(self, owner: Any, name: str, argument: str, value: Any) -> None:
        """Have calls of ``owner.name`` that leave out ``argument`` pass ``value``."""

        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return wrapped(*args, **{argument: value} | kwargs)

        self.wrap(owner, name, wrapper)

    def drop_argument(self, owner: Any, name: str, argument: str) -> None:
        """Have calls of ``owner.name`` leave out the keyword ``argument``."""

        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return wrapped(*args, **{key: kwargs[key] for key in kwargs if key != argument})

        self.wrap(owner, name, wrapper)


def overlaid(thing: Any, **attributes: Any) -> Any:
    """``thing`` in every respect, but with other values for some of its attributes."""
    import wrapt

    fixed = {
        name: staticmethod(value) if isinstance(value, FunctionType) else value
        for name, value in attributes.items()
    }
    return type("Overlaid", (wrapt.ObjectProxy,), fixed)(thing)


def _own_or_inherited(owner: Any, name: str) -> Any:
    """The attribute as its namespace holds it, so that descriptors stay descriptors."""
    if isinstance(owner, type):
        for base in owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return getattr(owner, name)
