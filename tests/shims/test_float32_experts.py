"""float32-experts: experts that vLLM 0.27 turns down on a CPU with AMX."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.errors import InputError
from eagle3compat.shim import Status
from eagle3compat.shims.float32_experts import SHIM

EXPERTS = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
TURNS_DOWN = """
    def check_grouped_gemm(self, layer):
        if torch.cpu._is_amx_tile_supported():
            if dtype == torch.bfloat16:
                return True, "amx"
            raise RuntimeError(self._grouped_gemm_alignment_error(layer))
"""


def with_experts(builds: Builds, text: str) -> Builds:
    return replace(builds, texts={**builds.texts, EXPERTS: text})


def test_not_needed_where_nothing_is_turned_down(installed: Builds, later: Builds) -> None:
    for builds in (installed, later, installed.without(EXPERTS)):
        assert builds.probe(SHIM).status is Status.NOT_NEEDED


def test_needed_where_other_dtypes_than_bfloat16_are_turned_down(installed: Builds) -> None:
    finding = with_experts(installed, TURNS_DOWN).probe(SHIM)
    assert finding.status is Status.NEEDED
    assert "dtype" in (finding.conditional or "")
    assert "VllmConfig(" in installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


def test_drift_where_it_is_not_known_what_is_turned_down(installed: Builds) -> None:
    for known in ("dtype == torch.bfloat16", "_is_amx_tile_supported()"):
        changed = with_experts(installed, TURNS_DOWN.replace(known, "is_fine()"))
        assert changed.probe(SHIM).status is Status.DRIFT
    assert installed.without_text(EXPERTS).probe(SHIM).status is Status.DRIFT
    no_call = installed.edited(GENERATOR, "return VllmConfig(", "return make_config(")
    assert with_experts(no_call, TURNS_DOWN).probe(SHIM).status is Status.DRIFT


@pytest.mark.parametrize(
    ("cpu", "amx", "experts", "dtype", "refused"),
    [
        (True, True, 8, "float32", True),
        (True, True, 8, "bfloat16", False),
        (True, True, 0, "float32", False),
        (True, False, 8, "float32", False),
        (False, True, 8, "float32", False),
    ],
)
def test_what_would_be_turned_down_is_refused_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, amx: bool, experts: int, dtype: str, refused: bool
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: cpu)
    features = SimpleNamespace(_is_amx_tile_supported=lambda: amx)
    for module in (
        module_with("torch", cpu=features, bfloat16="bfloat16"),
        module_with("vllm"),
        module_with("vllm.platforms", current_platform=platform),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config: Any = Recorder("made")
    generator = module_with(GENERATOR, VllmConfig=config)
    model = SimpleNamespace(dtype=dtype, get_num_experts=lambda: experts)
    with carried_out(generator, SHIM.id):
        if refused:
            with pytest.raises(InputError, match=r"expected bfloat16.*found float32"):
                generator.VllmConfig(model_config=model)
        else:
            assert generator.VllmConfig(model_config=model) == "made"
            assert SHIM.id in settled.choices()
