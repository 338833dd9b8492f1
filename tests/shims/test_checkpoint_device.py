"""checkpoint-device: a checkpoint is loaded to the CPU where there is no accelerator."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import CHECKPOINTER, Status
from eagle3compat.shims.checkpoint_device import SHIM


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert finding.conditional
        line = builds.text(CHECKPOINTER).splitlines()[(finding.line or 0) - 1]
        assert "load_safetensors_state_dict(" in line


def test_drift_where_the_class_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(CHECKPOINTER, 'map_location="cuda:0"', 'map_location="cuda"'),
        installed.without(CHECKPOINTER),
        installed.without_text(CHECKPOINTER),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def torch_with(accelerator: bool, load: Any = None) -> Any:
    available = SimpleNamespace(is_available=lambda: accelerator)
    return SimpleNamespace(accelerator=available, load=load)


def earlier(torch: Any, load: Any) -> ModuleType:
    """The module of speculators 0.3."""
    return module_with(CHECKPOINTER, torch=torch, load_safetensors_state_dict=load)


@pytest.mark.parametrize(("accelerator", "device"), [(True, "cuda:0"), (False, "cpu")])
def test_03_loads_to_what_is_there(accelerator: bool, device: str) -> None:
    load, load_weights = Recorder("optimizer"), Recorder("weights")
    module = earlier(torch_with(accelerator, load), load_weights)
    with carried_out(module, SHIM.id):
        assert module.load_safetensors_state_dict("path", "cuda:0") == "weights"
        module.load_safetensors_state_dict("path", "cpu")
        assert module.torch.load("path", weights_only=True, map_location="cuda:0") == "optimizer"
        module.torch.load("path", weights_only=True)
    assert load_weights.calls == [(("path", device), {}), (("path", "cpu"), {})]
    assert load.calls == [
        (("path",), {"weights_only": True, "map_location": device}),
        (("path",), {"weights_only": True}),
    ]


def test_04_is_told_what_is_there() -> None:
    module = module_with(CHECKPOINTER, torch=torch_with(True), get_current_device=lambda: "npu:0")
    with carried_out(module, SHIM.id):
        assert module.get_current_device() == "npu:0"


def test_04_is_not_asked_where_there_is_nothing() -> None:
    """A torch that was built for CUDA raises there that it found no driver."""
    asked = Recorder()
    module = module_with(CHECKPOINTER, torch=torch_with(False), get_current_device=asked)
    with carried_out(module, SHIM.id):
        assert module.get_current_device() == "cpu"
    assert asked.calls == []
    assert "no accelerator" in settled.choices()[SHIM.id]
