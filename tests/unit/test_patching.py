"""The ledger replaces attributes and undoes it exactly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3compat.patching import LOADED_MODULES, Ledger, Patcher


@pytest.fixture
def module() -> Iterator[ModuleType]:
    class Base:
        def method(self) -> str:
            return "base"

        @staticmethod
        def fixed() -> str:
            return "fixed"

    class Derived(Base):
        pass

    def function(a: int, b: int = 2, **more: int) -> tuple[int, int, dict[str, int]]:
        return a, b, more

    made = ModuleType("eagle3compat_patch_target")
    vars(made).update(Base=Base, Derived=Derived, function=function, constant=1)
    for thing in (Base, Derived, function):
        thing.__module__ = made.__name__
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def patcher(ledger: Ledger, module: ModuleType) -> Patcher:
    return Patcher(ledger, module, "a-shim")


def snapshot(module: ModuleType) -> dict[str, Any]:
    classes = {name: dict(vars(vars(module)[name])) for name in ("Base", "Derived")}
    return {"module": dict(vars(module)), **classes}


def test_undo_restores_every_namespace_exactly(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    before = snapshot(module)
    patcher.replace(module, "constant", 2)
    patcher.replace(module, "new", 3)
    patcher.wrap(module, "function", lambda wrapped, instance, args, kwargs: "wrapped")
    patcher.wrap(module.Derived, "method", lambda wrapped, instance, args, kwargs: "wrapped")
    patcher.extend(module, "Base", lambda base: type("Extended", (base,), {}))
    assert snapshot(module) != before
    assert ledger.undo() == ()
    assert snapshot(module) == before
    assert ledger.live() == ()


def test_an_inherited_attribute_is_deleted_again_not_set(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    patcher.wrap(module.Derived, "method", lambda wrapped, instance, args, kwargs: "wrapped")
    assert module.Derived().method() == "wrapped"
    assert module.Base().method() == "base"
    ledger.undo()
    assert "method" not in vars(module.Derived)
    assert module.Derived().method() == "base"


def test_a_static_method_stays_one(ledger: Ledger, module: ModuleType, patcher: Patcher) -> None:
    patcher.wrap(module.Base, "fixed", lambda wrapped, instance, args, kwargs: wrapped() + "!")
    assert module.Base.fixed() == module.Base().fixed() == "fixed!"
    ledger.undo()
    assert isinstance(vars(module.Base)["fixed"], staticmethod)


def test_what_somebody_patched_over_is_left_alone_and_named(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    patcher.replace(module, "constant", 2)
    patcher.replace(module, "constant", 3)
    module.constant = "theirs"
    assert ledger.displaced() == ("eagle3compat_patch_target.constant",)
    assert ledger.undo() == ("eagle3compat_patch_target.constant",)
    assert module.constant == "theirs"


def test_what_somebody_deleted_is_left_alone(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    patcher.replace(module, "constant", 2)
    del module.constant
    assert ledger.undo() == ("eagle3compat_patch_target.constant",)
    assert not hasattr(module, "constant")


def test_undo_of_one_module_keeps_the_others(ledger: Ledger, module: ModuleType) -> None:
    other = ModuleType("other")
    other.constant = 1
    Patcher(ledger, module, "first").replace(module, "constant", 2)
    Patcher(ledger, other, "second").replace(other, "constant", 2)
    ledger.undo(module)
    assert (module.constant, other.constant) == (1, 2)
    assert ledger.live() == ("second",)
    assert ledger.has(other)
    assert not ledger.has(module)


def test_what_a_reload_does_not_set_anew_is_undone_by_it(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    def patch() -> None:
        patcher.replace(module, "constant", 2)
        patcher.replace(module, "shadowed_builtin", 3)
        patcher.replace(LOADED_MODULES, "eagle3compat_stand_in", ModuleType("stand_in"))

    patch()
    module.constant = 1  # as the module's code does when it runs again
    ledger.forget(module)
    patch()
    assert ledger.undo() == ()
    assert module.constant == 1
    assert not hasattr(module, "shadowed_builtin")
    assert "eagle3compat_stand_in" not in sys.modules


def test_classes_from_before_a_reload_stay_patched_until_all_is_undone(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    before = module.Base
    own = vars(before)["method"]
    patcher.wrap(before, "method", lambda wrapped, instance, args, kwargs: "wrapped")
    module.Base = type("Base", (), {})
    ledger.forget(module)
    assert before().method() == "wrapped"
    ledger.undo()
    assert vars(before)["method"] is own


def test_a_reference_taken_earlier_is_found_and_named(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    elsewhere = ModuleType("eagle3compat_elsewhere")
    elsewhere.taken = module.function
    sys.modules[elsewhere.__name__] = elsewhere
    try:
        patcher.wrap(module, "function", lambda wrapped, instance, args, kwargs: "wrapped")
        assert ledger.stale() == (
            "eagle3compat_elsewhere.taken (earlier eagle3compat_patch_target.function)",
        )
    finally:
        del sys.modules[elsewhere.__name__]
    assert ledger.stale() == ()


def test_a_providers_own_object_elsewhere_is_not_called_stale(
    ledger: Ledger, module: ModuleType, patcher: Patcher
) -> None:
    patcher.replace(module, "constant", 2)
    module.OrderedDict = __import__("collections").OrderedDict
    patcher.extend(module, "OrderedDict", lambda base: type("Mine", (base,), {}))
    assert ledger.stale() == ()


def test_arguments_are_added_and_dropped_unless_the_caller_gives_them(
    module: ModuleType, patcher: Patcher
) -> None:
    patcher.add_argument(module, "function", "b", 5)
    patcher.drop_argument(module, "function", "gone")
    assert module.function(1, gone=4) == (1, 5, {})
    assert module.function(1, b=6, kept=7) == (1, 6, {"kept": 7})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers()), max_size=20))
def test_any_sequence_of_replacements_is_undone(steps: list[tuple[str, int]]) -> None:
    target = ModuleType("target")
    target.a = target.b = 0
    before = dict(vars(target))
    ledger = Ledger()
    for name, value in steps:
        ledger.replace(target, target, name, value, "a-shim")
    ledger.undo()
    assert dict(vars(target)) == before
