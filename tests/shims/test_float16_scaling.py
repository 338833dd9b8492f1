"""float16-scaling: DeepSeek's residual stream is scaled in float16."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import WORKER, Builds
from standins import carried_out, module_with

from eagle3compat.errors import InputError
from eagle3compat.shim import Status
from eagle3compat.shims.float16_scaling import SHIM

MODEL = "vllm.model_executor.models.deepseek_v2"
SCALING = "residual *= 1.0 / self.routed_scaling_factor"


def test_needed_where_the_layers_scale(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert "dtype" in (finding.conditional or "")


def test_not_needed_where_float16_is_nothing_special(installed: Builds) -> None:
    builds = installed
    text = builds.text(MODEL)
    plain = text.replace("torch.float16", "torch.float64")
    assert Builds(builds.sources, {MODEL: plain}).probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_it_scales_in_another_way(installed: Builds) -> None:
    other = "residual = residual / self.routed_scaling_factor"
    assert installed.edited(MODEL, SCALING, other).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_model_cannot_be_read(installed: Builds) -> None:
    for builds in (installed.without(MODEL), installed.without_text(MODEL)):
        assert builds.probe(SHIM).status is Status.DRIFT


class Extension:
    def __init__(self, dtype: str, **text_config: Any) -> None:
        config = SimpleNamespace(dtype=dtype, hf_text_config=SimpleNamespace(**text_config))
        self.model_runner = SimpleNamespace(model_config=config)
        self.set_up_for: Any = None

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        self.set_up_for = layer_ids


@pytest.fixture
def module() -> ModuleType:
    torch = module_with("torch", float16="float16")
    return module_with(WORKER, HiddenStatesWorkerExtension=Extension, torch=torch)


def test_float16_with_a_factor_is_refused_before_anything_is_captured(module: ModuleType) -> None:
    with carried_out(module, SHIM.id):
        extension = module.HiddenStatesWorkerExtension("float16", routed_scaling_factor=2.5)
        with pytest.raises(InputError, match=r"2\.5.*float16"):
            extension._setup_hidden_states_capture([1])
    assert extension.set_up_for is None


@pytest.mark.parametrize(
    ("dtype", "text_config"),
    [
        ("bfloat16", {"routed_scaling_factor": 2.5}),
        ("float16", {"routed_scaling_factor": 1.0}),
        ("float16", {"routed_scaling_factor": None}),
        ("float16", {}),
    ],
)
def test_other_models_are_set_up(
    module: ModuleType, dtype: str, text_config: dict[str, Any]
) -> None:
    with carried_out(module, SHIM.id):
        extension = module.HiddenStatesWorkerExtension(dtype, **text_config)
        extension._setup_hidden_states_capture([1])
    assert extension.set_up_for == [1]
