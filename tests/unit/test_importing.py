"""The import hook calls back for modules imported before, during and after its installation."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle3compat.importing import ImportHook

NAME = "eagle3compat_hook_target"


class Recorder:
    """Counts calls and marks each module object that it was given."""

    def __init__(self, hook: Callable[[Recorder], ImportHook]) -> None:
        self.modules: list[ModuleType] = []
        self.failure: Exception | None = None
        self.hook = hook(self)

    def __call__(self, module: ModuleType) -> None:
        if self.failure is not None:
            raise self.failure
        assert module.complete, "called on a module whose code had not run to its end"
        module.patched = True
        self.modules.append(module)

    def install(self) -> None:
        self.hook.install(self)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    write_target(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Recorder(lambda recorder: ImportHook([NAME], recorder))
    yield made
    made.hook.remove()
    for name in [name for name in sys.modules if name.partition(".")[0].startswith(NAME)]:
        del sys.modules[name]


def write_target(folder: Path, begin: str = "", end: str = "") -> None:
    (folder / f"{NAME}.py").write_text(f"{begin}\npatched = False\n{end}\ncomplete = True\n")


def load() -> ModuleType:
    return importlib.import_module(NAME)


def test_a_module_imported_later_is_patched_when_its_code_has_run(recorder: Recorder) -> None:
    recorder.install()
    assert recorder.modules == []
    assert load().patched


def test_a_module_imported_earlier_is_patched_at_once(recorder: Recorder) -> None:
    module = load()
    recorder.install()
    assert module.patched


def test_a_half_imported_module_is_patched_when_it_is_whole(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "eagle3compat_test_recorder", recorder, raising=False)
    write_target(tmp_path, begin="import sys; sys.eagle3compat_test_recorder.install()")
    module = load()
    assert module.patched
    assert recorder.modules == [module]


def test_a_half_imported_module_whose_own_code_fails_is_not_patched(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "eagle3compat_test_recorder", recorder, raising=False)
    write_target(
        tmp_path, begin="import sys; sys.eagle3compat_test_recorder.install()", end="1 / 0"
    )
    with pytest.raises(ZeroDivisionError):
        load()
    assert recorder.modules == []


def test_a_failure_on_a_half_imported_module_fails_its_import_each_time(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "eagle3compat_test_recorder", recorder, raising=False)
    write_target(
        tmp_path,
        begin="import sys; r = sys.eagle3compat_test_recorder; r.hook.active or r.install()",
    )
    recorder.failure = RuntimeError("no")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            load()
        assert NAME not in sys.modules


def test_a_module_imported_by_another_thread_meanwhile_is_patched_once(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "eagle3compat_test_events", (begun, go_on), raising=False)
    write_target(
        tmp_path,
        begin="import sys; b, g = sys.eagle3compat_test_events; b.set(); assert g.wait(10)",
    )
    importer = threading.Thread(target=load)
    importer.start()
    assert begun.wait(10)
    recorder.install()
    assert recorder.modules == []
    go_on.set()
    importer.join(10)
    assert recorder.modules == [sys.modules[NAME]]


def test_a_failing_callback_fails_every_attempt_to_import(recorder: Recorder) -> None:
    recorder.failure = RuntimeError("cannot patch")
    recorder.install()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cannot patch"):
            load()
        assert NAME not in sys.modules
    recorder.failure = None
    assert load().patched


def test_a_reloaded_module_is_patched_anew(recorder: Recorder) -> None:
    recorder.install()
    module = load()
    for times in (2, 3):
        assert importlib.reload(module).patched
        assert len(recorder.modules) == times


def test_a_failing_callback_leaves_nothing_usable_in_a_module_that_is_reloaded(
    recorder: Recorder,
) -> None:
    """importlib.reload keeps it in sys.modules whatever is raised."""
    recorder.install()
    module = load()
    recorder.failure = RuntimeError("cannot patch")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot patch"):
            importlib.reload(module)
        assert not hasattr(load(), "complete")
    recorder.failure = None
    assert importlib.reload(module).patched


def test_a_module_that_becomes_whole_while_we_begin_to_watch_it_is_patched(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load()
    spec = module.__spec__
    assert spec is not None

    class SeenHalfImported(type(spec)):  # type: ignore[misc]
        """Half imported at the first look; another thread ends the import right after it."""

        looks = iter([True])

        @property
        def _initializing(self) -> bool:
            return next(self.looks, False)

    spec.__class__ = SeenHalfImported
    recorder.install()
    assert recorder.modules == [module]
    assert type(spec) is ModuleSpec


def test_a_module_dropped_and_imported_again_is_patched(recorder: Recorder) -> None:
    recorder.install()
    first = load()
    del sys.modules[NAME]
    second = load()
    assert second is not first
    assert second.patched


def test_after_removal_imports_and_reloads_are_left_alone(recorder: Recorder) -> None:
    recorder.install()
    module = load()
    recorder.hook.remove()
    assert recorder.hook not in sys.meta_path
    assert not importlib.reload(module).patched
    del sys.modules[NAME]
    assert not load().patched


def test_removal_while_a_module_is_half_imported_leaves_it_alone(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "eagle3compat_test_recorder", recorder, raising=False)
    write_target(
        tmp_path,
        begin="import sys; r = sys.eagle3compat_test_recorder; r.install(); r.hook.remove()",
    )
    assert not load().patched


def test_two_hooks_on_one_module_both_call_back(recorder: Recorder) -> None:
    other = Recorder(lambda made: ImportHook([NAME], made))
    recorder.install()
    other.install()
    try:
        module = load()
    finally:
        other.hook.remove()
    assert recorder.modules == other.modules == [module]


def test_a_patched_module_keeps_its_own_loader(recorder: Recorder) -> None:
    plain = load()
    loader, file = type(plain.__loader__), plain.__file__
    del sys.modules[NAME]
    recorder.install()
    module = load()
    assert type(module.__loader__) is loader
    assert type(module.__spec__.loader) is loader
    assert module.__file__ == file
    assert "complete = True" in inspect.getsource(module)


def test_a_module_imported_while_another_is_searched_for_is_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"{NAME}_other"
    write_target(tmp_path)
    (tmp_path / f"{other}.py").write_text("complete = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class ImportingFinder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == NAME:
                importlib.import_module(other)

    monkeypatch.setattr(sys, "meta_path", [ImportingFinder(), *sys.meta_path])
    recorder = Recorder(lambda made: ImportHook([NAME, other], made))
    recorder.install()
    try:
        load()
        assert [module.__name__ for module in recorder.modules] == [other, NAME]
    finally:
        recorder.hook.remove()
        for name in (NAME, other):
            sys.modules.pop(name, None)


def test_modules_of_other_names_are_not_touched(recorder: Recorder) -> None:
    recorder.install()
    sys.modules.pop("colorsys", None)
    importlib.import_module("colorsys")
    assert recorder.modules == []


def test_a_missing_module_is_still_missing(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").unlink()
    importlib.invalidate_caches()
    recorder.install()
    with pytest.raises(ModuleNotFoundError):
        load()
