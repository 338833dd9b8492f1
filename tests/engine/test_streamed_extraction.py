"""Real extractions: killed and gone on with, from spoilt weights, in shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from subprocess import CompletedProcess

import pytest
from running import run_script

from eagle3compat.kimi.manifest import read_manifests
from eagle3compat.kimi.storage import read_sample, sample_path
from eagle3compat.reference import TOLERANCE, compare, reference_hidden_states

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
# Longer than a step and shorter, many in one step, one-token prompts and a shared prefix.
LENGTHS = (1, 1, 2, 17, 40, 33, 150, 300, 5, 64)
LAYERS = (2, 4, 5, 7)


def extract(model: Path, data: Path, out: Path, *options: str) -> CompletedProcess[str]:
    return run_script(
        *("-m", "eagle3compat", "extract", "--model", model, "--data", data, "--out", out),
        *("--dtype", "float32", "--max-num-batched-tokens", "128", *options),
    )


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    random = Random(5)
    sequences = [[random.randrange(256) for _ in range(length)] for length in LENGTHS * 5]
    for sequence in sequences[::7]:
        sequence[:16] = range(min(16, len(sequence)))
    return sequences


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]]) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in sequences))
    return path


def test_two_kills_leave_the_files_of_an_undisturbed_run() -> None:
    done = run_script(
        ROOT / "benchmarks" / "killed_extraction.py", "--kills", "2", "--samples", "120"
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "killed a parent" in done.stdout
    assert "killed a worker" in done.stdout
    assert "error: InterruptedRun: a worker of vLLM died" in done.stdout


def check_states(kimi: Path, folder: Path, sequences: list[list[int]]) -> None:
    """Every state of every sample is that of transformers."""
    samples = [read_sample(sample_path(folder, index)) for index in range(len(sequences))]
    assert [sample["input_ids"].tolist() for sample in samples] == sequences
    expected = reference_hidden_states(kimi, sequences, LAYERS)
    comparison = compare([sample["hidden_states"] for sample in samples], expected, LAYERS)
    assert comparison.worst <= TOLERANCE


def test_steps_that_do_not_fit_the_kv_cache_are_right(
    kimi: Path, data: Path, sequences: list[list[int]], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("small_pool.py")
    done = run_script(script, kimi, data, tmp_path / "out")
    assert f"{len(sequences)} done, 0 set aside" in done.stdout, done.stderr[-3000:]
    check_states(kimi, tmp_path / "out" / "hidden_states", sequences)


def test_shards_share_a_folder_and_every_sample_is_right_and_proved(
    kimi: Path, data: Path, sequences: list[list[int]], tmp_path: Path
) -> None:
    for shard in ("1/2", "0/2"):
        done = extract(kimi, data, tmp_path / "out", "--shard", shard)
        assert done.returncode == 0, done.stderr[-3000:]
    manifests = read_manifests(tmp_path / "out")
    records = {index: record for each in manifests for index, record in each.done.items()}
    assert sorted(records) == list(range(len(sequences)))
    assert all(record.proof is not None and record.proof.holds for record in records.values())
    folder = tmp_path / "out" / "hidden_states"
    check_states(kimi, folder, sequences)
    again = extract(kimi, data, tmp_path / "out", "--shard", "0/2")
    assert again.returncode == 0
    assert "samples that earlier runs had done: 25" in again.stdout


def test_spoilt_weights_end_the_run_with_nothing_to_train_on(
    kimi: Path, data: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(kimi, model)
    for weights in model.glob("*.safetensors"):
        tensors = load_file(weights)
        for name in tensors:
            if name.endswith("layers.5.self_attn.o_proj.weight"):
                tensors[name][0, 0] = torch.nan
        save_file(tensors, weights, metadata={"format": "pt"})
    done = extract(model, data, tmp_path / "out")
    assert done.returncode == 2
    assert "none among the first 8; the first: states that are not finite" in done.stderr
    assert not list((tmp_path / "out" / "hidden_states").iterdir())
    (manifest,) = read_manifests(tmp_path / "out")
    assert not manifest.done
    assert manifest.set_aside
