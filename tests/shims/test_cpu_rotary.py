"""cpu-rotary: rotary embeddings on the CPU without vLLM's kernel."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import Status
from eagle3compat.shims.cpu_rotary import SHIM

ROTARY = "vllm.model_executor.layers.rotary_embedding.base"
VLLM_CONFIG = "vllm.config.vllm"


def test_needed_where_the_op_can_be_turned_off(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert "CPU" in (finding.conditional or "")
        assert "VllmConfig(" in builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


def test_drift_where_the_op_is_registered_otherwise_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(ROTARY, 'register("rotary_embedding")', 'register("rope")'),
        installed.without(ROTARY),
        installed.without_text(ROTARY),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_drift_where_the_config_has_no_place_for_it(installed: Builds) -> None:
    field = "    compilation_config: CompilationConfig ="
    for builds in (
        installed.edited(VLLM_CONFIG, field, "    compilation: CompilationConfig ="),
        installed.without(VLLM_CONFIG),
        installed.without_text(VLLM_CONFIG),
        installed.edited(GENERATOR, "return VllmConfig(", "return make_config("),
        installed.without(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_the_switch_that_it_uses_is_there(installed: Builds) -> None:
    facts = installed.facts()
    assert facts.has_member("vllm.config.CompilationConfig", "custom_ops") is True
    assert facts.resolve("vllm.platforms.current_platform") is not None


@pytest.fixture
def on_platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the adapter find a platform of a kind, and a compilation config."""

    def choose(*, cpu: bool) -> None:
        platform = SimpleNamespace(is_cpu=lambda: cpu)
        config = module_with("vllm.config", CompilationConfig=lambda: compilation())
        for module in (module_with("vllm.platforms", current_platform=platform), config):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(sys.modules, "vllm", module_with("vllm"))

    return choose


def compilation(*custom_ops: str) -> SimpleNamespace:
    return SimpleNamespace(custom_ops=list(custom_ops))


def test_on_a_cpu_the_op_is_turned_off(on_platform: Any) -> None:
    on_platform(cpu=True)
    config = Recorder("made")
    module = module_with(GENERATOR, VllmConfig=config)
    with carried_out(module, SHIM.id):
        assert module.VllmConfig(model_config="model") == "made"
    assert config.keywords == {
        "model_config": "model",
        "compilation_config": compilation("-rotary_embedding"),
    }
    assert "forward_native" in settled.choices()[SHIM.id]


def test_a_compilation_config_of_the_caller_is_added_to_once(on_platform: Any) -> None:
    on_platform(cpu=True)
    module = module_with(GENERATOR, VllmConfig=Recorder())
    own = compilation("all")
    with carried_out(module, SHIM.id):
        module.VllmConfig(compilation_config=own)
        module.VllmConfig(compilation_config=own)
    assert own == compilation("all", "-rotary_embedding")


def test_off_the_cpu_the_call_is_left_alone(on_platform: Any) -> None:
    on_platform(cpu=False)
    config = Recorder("made")
    module = module_with(GENERATOR, VllmConfig=config)
    with carried_out(module, SHIM.id):
        assert module.VllmConfig(model_config="model") == "made"
    assert config.keywords == {"model_config": "model"}
    assert "not a CPU" in settled.choices()[SHIM.id]
