"""What an extraction will take, and what is said to fit or not, before anything starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import call, lay_out_builds, the_error
from manifest_records import run_record, sample_record

import eagle3compat
from eagle3compat.errors import InputError
from eagle3compat.kimi.estimate import GIB, Estimate, EstimateSettings, estimate, estimate_rows
from eagle3compat.kimi.manifest import ManifestWriter, manifest_path
from eagle3compat.kimi.storage import sample_bytes
from eagle3compat.tiny import write_tiny_kimi
from eagle3compat.tiny.dense import write_tiny_dense

CONFIG = Path(__file__).parent.parent / "data" / "configs" / "kimi-k2.5.json"


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    shutil.copy(CONFIG, folder / "config.json")
    return folder


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def found(kimi: Path, **options: Any) -> Estimate:
    memory = options.pop("gib", None)
    options.setdefault("gpu_memory", None if memory is None else int(memory * GIB))
    return estimate(EstimateSettings(kimi, **options))


def test_kimis_figures_follow_from_its_config(kimi: Path) -> None:
    what = found(kimi, tokens=10**6, samples=1000, tensor_parallel_size=8, tokens_per_second=4000)
    assert what.layers == (2, 30, 58, 60)
    assert what.bytes_a_token == 57_344
    assert what.cache_a_token == 61 * (512 + 64) * 2
    assert what.weights == pytest.approx(594e9, rel=0.005)
    assert what.states_on_gpu == 2 * 8192 * 57_344
    assert what.host_pinned == 4 * 8192 * (57_344 + 4 * 12)
    assert what.seconds == 250
    assert what.bytes_a_second == 4000 * 57_344
    assert what.gpu_memory is None
    assert any("--gpu-memory" in note for note in what.notes)


def test_the_disk_holds_every_file_and_its_head(kimi: Path, tmp_path: Path) -> None:
    what = found(kimi, tokens=10 * 500, samples=10, out=tmp_path / "new" / "out")
    files = 10 * sample_bytes(500, 4, 7168, 2)
    assert what.bytes_to_write is not None
    assert files <= what.bytes_to_write < files + 10 * 2000
    assert what.disk_free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tokens": 10**12, "samples": 10**6}, "disk: .* are needed"),
        ({"gib": 70, "tensor_parallel_size": 8}, "GPU: .* are needed on each of 8 at least"),
        ({"gib": 80, "tensor_parallel_size": 8, "max_model_len": 10**6}, "GPU: "),
        ({"tensor_parallel_size": 3}, "64 attention heads cannot be split evenly"),
        ({"tensor_parallel_size": 128}, "an expert's part has 16 columns, no multiple of the 32"),
        ({"max_num_batched_tokens": 10**9}, "host memory: "),
    ],
)
def test_what_will_not_fit_is_said(kimi: Path, options: dict[str, Any], problem: str) -> None:
    what = found(kimi, **options)
    assert not what.fits
    assert any(re.search(problem, each) for each in what.problems), what.problems


def test_what_fits_on_eight_gpus_of_80_gib_is_said_to(kimi: Path) -> None:
    what = found(kimi, gib=80, tensor_parallel_size=8, tokens=1000, samples=1)
    assert what.fits
    assert what.gpu_needed is not None and what.gpu_left is not None
    assert what.gpu_needed < 80 * GIB
    assert 0 < what.gpu_left < 8 * GIB
    # 0.16 of what the weights leave free, as speculators sizes it.
    assert what.weights_a_gpu is not None and what.cache_tokens is not None
    assert what.cache_tokens == int((80 * GIB - what.weights_a_gpu) * 0.16) // 70_272


def test_the_least_memory_is_just_enough(kimi: Path) -> None:
    for length in (2048, 200_000):
        options: dict[str, Any] = {
            "tensor_parallel_size": 8,
            "max_model_len": length,
            "max_num_batched_tokens": 4096,
        }
        needed = found(kimi, **options).gpu_needed
        assert needed is not None
        enough = found(kimi, **options, gpu_memory=needed + 2)
        assert enough.fits
        assert enough.cache_tokens is not None and enough.gpu_left is not None
        assert enough.cache_tokens >= length - 1
        assert enough.gpu_left >= -1
        assert not found(kimi, **options, gpu_memory=needed - 2).fits


def test_a_data_set_is_sized_by_its_account_or_its_rows(kimi: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    what = found(kimi, data=data)
    assert (what.samples, what.tokens) == (2, 4)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    account = {"samples": 7, "tokens": 70, "longest": 20}
    (prepared / "account.json").write_text(json.dumps(account))
    what = found(kimi, data=prepared)
    assert (what.samples, what.tokens) == (7, 70)
    with pytest.raises(InputError, match="raise --max-model-len to 21"):
        found(kimi, data=prepared, max_model_len=20)
    with pytest.raises(InputError, match="without account"):
        found(kimi, data=tmp_path)


def test_what_an_earlier_run_has_done_is_not_needed_again(kimi: Path, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    tokens = int(1.5 * free) // 57_344
    assert not found(kimi, tokens=tokens, samples=1, out=tmp_path).fits
    manifest = ManifestWriter(manifest_path(tmp_path, (0, 1)))
    manifest.append([run_record(), sample_record(0, bytes=free)])
    manifest.close()
    what = found(kimi, tokens=tokens, samples=1, out=tmp_path)
    assert what.bytes_there == free
    assert what.fits


def test_another_architecture_is_not_guessed_at(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    write_tiny_dense(tmp_path / "gemma", "gemma3")
    what = found(tmp_path / "gemma", layers=(1, 2, 3), gib=1)
    assert (what.parameters, what.weights_a_gpu, what.gpu_needed) == (None, None, None)
    assert what.weights == (tmp_path / "gemma" / "model.safetensors").stat().st_size
    assert "'gemma3_text'" in what.notes[1]
    assert dict(estimate_rows(what))["parameters"] == "unknown"
    (tmp_path / "gemma" / "model.safetensors").unlink()
    what = found(tmp_path / "gemma", layers=(1, 2, 3))
    assert what.weights is None


def test_an_index_tells_the_size_of_what_is_not_counted(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    write_tiny_kimi(tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    counted = found(tmp_path / "tiny").weights
    config["text_config"]["model_type"] = "other"
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    assert found(tmp_path / "tiny").weights == counted


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_builds(tmp_path_factory.mktemp("builds"))


def run(builds: Path, *options: str | Path, **environment: str) -> Any:
    return call("-m", "eagle3compat", "plan", *options, builds=builds, **environment)


def test_the_command_prints_plain_lines_when_piped(builds: Path, kimi: Path) -> None:
    shown = run(builds, "--model", kimi, "--tokens", "1000", "--samples", "2")
    assert shown.returncode == 0, shown.stderr
    assert "bytes a token    57,344 (bfloat16)\n" in shown.stdout
    assert not any(mark in shown.stdout for mark in "│─\x1b")


def test_the_command_prints_json_and_ends_with_1_where_it_does_not_fit(
    builds: Path, kimi: Path
) -> None:
    options = ("--model", kimi, "--tensor-parallel-size", "8", "--gpu-memory", "60", "--json")
    shown = run(builds, *options)
    assert shown.returncode == 1, shown.stderr
    content = json.loads(shown.stdout)
    assert content["fits"] is False
    assert content["parameters"] == 1_026_879_376_368
    assert len(content["problems"]) == 1


def test_the_command_asks_nvidia_smi(builds: Path, kimi: Path, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '143771\\n143771\\n'\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"
    shown = run(builds, "--model", kimi, "--tensor-parallel-size", "8", "--tokens", "1", PATH=path)
    assert shown.returncode == 1
    assert "8 (tensor parallel), 140.4 GiB each" in shown.stdout
    assert "nvidia-smi lists 2 GPUs" in shown.stdout


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--model", "/nowhere"), "no such folder"),
        (("--model", "KIMI", "--layers", "61"), "out of range"),
        (("--model", "KIMI", "--dtype", "float16"), "would be wrong"),
        (("--model", "KIMI", "--data", "/nowhere.jsonl"), "cannot be read"),
        (("--model", "KIMI", "--tokens", "0"), "greater than or equal to 1"),
    ],
)
def test_bad_input_is_one_line(
    builds: Path, kimi: Path, options: tuple[str, ...], fault: str
) -> None:
    given = [str(kimi) if option == "KIMI" else option for option in options]
    assert fault in the_error(run(builds, *given))


def test_neither_torch_nor_an_engine_is_imported(kimi: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from eagle3compat.kimi.estimate import *; "
        f"estimate(EstimateSettings(Path({str(kimi)!r}), tokens=5)); "
        "print({'torch', 'transformers', 'vllm', 'speculators'} & set(sys.modules))"
    )
    path = str(Path(eagle3compat.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": path}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "set()\n"
