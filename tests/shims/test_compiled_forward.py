"""compiled-forward: without an accelerator the draft's forward pass runs as it is written."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import DRAFT_MODEL, Status
from eagle3compat.shims.compiled_forward import SHIM


def test_needed_where_compilation_asks_for_no_device(installed: Builds, later: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert finding.conditional
    assert "@torch.compile" in installed.text(DRAFT_MODEL).splitlines()[(finding.line or 0) - 1]
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(DRAFT_MODEL, "@torch.compile", "@torch.compile(dynamic=True)"),
        installed.without(DRAFT_MODEL),
        installed.without_text(DRAFT_MODEL),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def draft_module(accelerator: bool, compiled: bool = True) -> ModuleType:
    def as_written(self: Any, states: int) -> str:
        return f"as written, {states}"

    def forward(self: Any, states: int) -> str:
        return f"compiled, {states}"

    vars(forward)["_torchdynamo_orig_callable"] = as_written
    draft = type("Draft", (), {"forward": forward if compiled else as_written})
    torch = SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: accelerator))
    return module_with(DRAFT_MODEL, Eagle3DraftModel=draft, torch=torch)


@pytest.mark.parametrize(
    ("accelerator", "compiled", "expected"),
    [
        (True, True, "compiled, 1"),
        (False, True, "as written, 1"),
        (False, False, "as written, 1"),
        (True, False, "as written, 1"),
    ],
)
def test_the_device_decides(accelerator: bool, compiled: bool, expected: str) -> None:
    with carried_out(module := draft_module(accelerator, compiled), SHIM.id):
        assert module.Eagle3DraftModel().forward(states=1) == expected
    assert ("not compiled" in settled.choices()[SHIM.id]) is not accelerator


def test_torch_keeps_the_function_that_it_compiles() -> None:
    """``_torchdynamo_orig_callable`` begins with an underscore: it is held against real torch."""
    torch = pytest.importorskip("torch")

    def as_written() -> None: ...

    assert torch.compile(as_written)._torchdynamo_orig_callable is as_written
