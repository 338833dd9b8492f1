"""Import hooks: carry a plan out on modules imported before, during or after.

A finder of our own stands first on ``sys.meta_path`` and wraps the loader of the modules that
concern us. Registered post-import callbacks (wrapt, importhook) do not do here: theirs are spent
at the first load, so that a module whose callback raised, or that is reloaded, comes up unpatched
without a word, and they fire at once on a module that is only half imported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    # importlib.abc brings a third of what `apply()` would import otherwise.
    from importlib.abc import Loader

Callback = Callable[[ModuleType], None]


class ImportHook:
    """Calls ``callback(module)`` each time one of ``names`` has been executed, until removed.

    An exception of the callback makes the import fail, at this and at every later attempt. A
    module whose reload fails so stays loaded, but empty.
    """

    def __init__(self, names: Iterable[str], callback: Callback) -> None:
        self._names = frozenset(names)
        self._callback = callback
        self._searching = threading.local()

    def install(self, loaded: Callback) -> None:
        """Watch imports from now on, and those under way.

        Args:
            loaded: called with each module of ``names`` that is loaded already.
        """
        sys.meta_path.insert(0, self)
        for name in sorted(self._names):
            module = sys.modules.get(name)
            if module is None:
                continue
            spec = module.__spec__
            if spec is None or not getattr(spec, "_initializing", False):
                loaded(module)
            elif not isinstance(spec.loader, _PatchingLoader):
                _WatchedSpec.watch(spec, self.call)

    def remove(self) -> None:
        """Stop watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    @property
    def active(self) -> bool:
        """Whether imports are being watched."""
        return self in sys.meta_path

    def call(self, module: ModuleType) -> None:
        """Hand a module that has just been executed to the callback."""
        if self.active:
            self._callback(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls back."""
        # Other finders may ask for the same name again; or import another of ours meanwhile.
        searching: set[str] = vars(self._searching).setdefault("names", set())
        if fullname not in self._names or fullname in searching:
            return None
        searching.add(fullname)
        try:
            spec = self._others_spec(fullname, path, target)
        finally:
            searching.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _PatchingLoader(spec.loader, self))
        return spec

    def _others_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in tuple(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _PatchingLoader:
    """A module's own loader in every respect, but that it calls back after execution."""

    def __init__(self, loader: Loader, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._hook.call(module)
        except BaseException:
            # importlib.reload leaves the module in sys.modules whatever is raised.
            for name in [name for name in vars(module) if not name.startswith("__")]:
                delattr(module, name)
            raise


class _WatchedSpec(ModuleSpec):
    """The spec of a module that was half imported when we came: tells when it is whole.

    The import system clears ``_initializing`` as its last act on a module.
    """

    _watcher: Callback

    @classmethod
    def watch(cls, spec: ModuleSpec, watcher: Callback) -> None:
        spec.__dict__["_watcher"] = watcher
        spec.__class__ = cls
        if not getattr(spec, "_initializing", False):  # made whole by another thread meanwhile
            cast("_WatchedSpec", spec)._tell()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self._tell()

    def _tell(self) -> None:
        watcher = self.__dict__.pop("_watcher", None)
        if watcher is None:
            return  # told already
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        module = sys.modules.get(self.name)
        if module is None or module.__spec__ is not self:
            return  # its own code raised
        try:
            watcher(module)
        except BaseException:
            sys.modules.pop(self.name, None)
            raise
