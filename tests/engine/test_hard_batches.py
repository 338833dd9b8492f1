"""After ``apply()``, a real engine's states equal transformers', in the order of the inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import Run

from eagle3compat.reference import TOLERANCE
from eagle3compat.suite import hard_calls

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def outcome(run_python: Run, kimi: Path, other_kimi: Path) -> Any:
    return run_python("-m", "eagle3compat.suite", kimi, other_kimi)


@pytest.mark.parametrize("name", [call.name for call in hard_calls()])
def test_every_layer_of_every_prompt_equals_the_reference(outcome: Any, name: str) -> None:
    found = {call["name"]: call for call in outcome["calls"]}
    assert found[name]["result"] == "right", found[name]
    assert found[name]["worst"] <= TOLERANCE


def test_the_comparison_tells_another_model_apart(outcome: Any) -> None:
    assert outcome["control"] > 0.1


def test_conditional_shims_say_what_they_chose(outcome: Any) -> None:
    assert "CPU" in outcome["settled"]["cpu-rotary"]
    assert "no GPU" in outcome["settled"]["memory-query"]


def test_a_text_model_without_wrapper_is_right_too(
    run_python: Run, plain_deepseek: Path, other_kimi: Path
) -> None:
    outcome = run_python("-m", "eagle3compat.suite", plain_deepseek, other_kimi)
    assert outcome["right"], outcome
