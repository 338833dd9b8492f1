"""A vLLM changed on purpose is refused, before the engine starts or at its first step.

Each test runs the hard batches on a copy of the installed vLLM with one edit in its source.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from running import Run, run_script

from eagle3compat.installed import find_build

pytestmark = pytest.mark.engine

DEEPSEEK = "model_executor/models/deepseek_v2.py"
A_LAYER_RETURNS_MORE = {
    "        return hidden_states, residual\n\n\n": (
        "        return hidden_states, residual, None\n\n\n"
    ),
    "            hidden_states, residual = layer(\n": (
        "            hidden_states, residual, _ = layer(\n"
    ),
}
THE_ORDER_IS_ANOTHER = {
    "        return cast(list[str], self._req_ids)\n": (
        "        import sys\n\n"
        '        asker = sys._getframe(1).f_globals["__name__"]\n'
        "        if asker == 'eagle3compat.shims.request_order':\n"
        "            return self._req_ids[::-1]\n"
        "        return cast(list[str], self._req_ids)\n"
    )
}


def changed_vllm(folder: Path, module: str, edits: dict[str, str]) -> dict[str, str]:
    """Copy the installed vLLM, edit a module of the copy, and give the variables that choose it."""
    package_dir = find_build("vllm").package_dir
    shutil.copytree(package_dir, folder / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "vllm" / module
    text = file.read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, f"{module} holds {old!r} {text.count(old)} times, not once"
        text = text.replace(old, new)
    file.write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_a_layer_that_returns_another_shape_is_refused_at_the_first_step(
    tmp_path: Path, run_python: Run, kimi: Path, other_kimi: Path
) -> None:
    variables = changed_vllm(tmp_path, DEEPSEEK, A_LAYER_RETURNS_MORE)
    outcome = run_python("-m", "eagle3compat.suite", kimi, other_kimi, environment=variables)
    (only,) = outcome["calls"]
    assert only["result"] == "raised"
    assert "expected hidden states, or hidden states and residual; found tuple" in only["detail"]


def test_a_batch_in_another_order_than_the_runner_says_is_refused(
    tmp_path: Path, run_python: Run, kimi: Path, other_kimi: Path
) -> None:
    variables = changed_vllm(tmp_path, "v1/worker/gpu_input_batch.py", THE_ORDER_IS_ANOTHER)
    outcome: Any = run_python("-m", "eagle3compat.suite", kimi, other_kimi, environment=variables)
    *right, last = outcome["calls"]
    assert [call["name"] for call in right] == ["one token alone"], "a batch of one has no order"
    assert last["result"] == "raised"
    assert "expected rows in the order of the runner's batch" in last["detail"]


def test_a_parameter_that_a_shim_needs_and_that_is_gone_is_refused_before_any_engine(
    tmp_path: Path, kimi: Path, other_kimi: Path
) -> None:
    variables = changed_vllm(
        tmp_path,
        "v1/core/sched/scheduler.py",
        {"        block_size: int,\n": "        block_size: int,\n        pool_size: int,\n"},
    )
    out = tmp_path / "outcome.json"
    done = run_script("-m", "eagle3compat.suite", kimi, other_kimi, out, environment=variables)
    assert done.returncode != 0
    assert not out.exists()
    assert "Refusal" in done.stderr
    assert "pool_size" in done.stderr
