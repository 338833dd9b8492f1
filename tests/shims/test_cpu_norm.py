"""cpu-norm: RMS norms on the CPU without vLLM's kernel."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import Status
from eagle3compat.shims.cpu_norm import SHIM

NORM = "vllm.model_executor.layers.layernorm"


def test_needed_where_the_op_can_be_turned_off(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert "CPU" in (finding.conditional or "")
        assert "VllmConfig(" in builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


def test_drift_where_the_op_is_registered_otherwise_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(NORM, 'register("rms_norm")', 'register("norm")'),
        installed.without(NORM),
        installed.without_text(NORM),
        installed.edited(GENERATOR, "return VllmConfig(", "return make_config("),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


@pytest.mark.parametrize(("cpu", "off"), [(True, ["-rotary_embedding", "-rms_norm"]), (False, [])])
def test_both_ops_are_turned_off_on_a_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, off: list[str]
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: cpu)
    made = SimpleNamespace(custom_ops=[])
    for module in (
        module_with("vllm"),
        module_with("vllm.platforms", current_platform=platform),
        module_with("vllm.config", CompilationConfig=lambda: made),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config: Any = Recorder("made")
    generator = module_with(GENERATOR, VllmConfig=config)
    with carried_out(generator, SHIM.id, "cpu-rotary"):
        assert generator.VllmConfig(model_config="model") == "made"
    assert config.keywords.get("compilation_config", made) is made
    assert sorted(made.custom_ops) == sorted(off)
    assert set(settled.choices()) == {"cpu-norm", "cpu-rotary"}
