"""Bad input to ``eagle3compat extract``: one clear line, exit 2, before anything is imported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from command_line import call, lay_out_builds, the_error

CONFIG = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 100}
OPTIONS = {"--model": "model", "--data": "data.jsonl", "--out": "out"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with a checkpoint, a data set and two builds, all of them usable."""
    lay_out_builds(tmp_path / "builds")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    return tmp_path


def extract(place: Path, **options: str) -> str:
    """The error that ``extract`` gives with these options (written with underscores)."""
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    arguments = [part for pair in {**OPTIONS, **named}.items() for part in pair]
    command = ("-m", "eagle3compat", "extract", *arguments)
    error = the_error(call(*command, builds=place / "builds", folder=place))
    assert not (place / "out").exists() or options.get("out") == "used"
    return error


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"model": "nowhere"}, "no such folder"),
        ({"model": "builds"}, "has no config.json"),
        ({"data": "nowhere.jsonl"}, "cannot be read"),
        ({"layers": "2,8"}, "[8] is out of range; model has layers 0 to 7"),
        ({"layers": "2,4,2"}, "[2] is repeated"),
        ({"layers": "2,four"}, "expected integers"),
        ({"layers": ""}, "expected integers"),
        ({"max_model_len": "3"}, "data.jsonl:1: 3 tokens and the one that the engine samples"),
        ({"max_model_len": "1"}, "--max-model-len"),
        ({"max_model_len": "many"}, "--max-model-len"),
        ({"max_num_seqs": "0"}, "--max-num-seqs"),
        ({"shard": "2/2"}, "--shard 2/2: expected I/N"),
        ({"shard": "all"}, "--shard all: expected I/N"),
        ({"tensor_parallel_size": "0"}, "--tensor-parallel-size"),
        ({"max_num_batched_tokens": "31"}, "--max-num-batched-tokens"),
        ({"dtype": "int8"}, "--dtype"),
        ({"layer": "2"}, "--layer"),
    ],
)
def test_a_bad_option_is_named(place: Path, options: dict[str, str], fault: str) -> None:
    assert fault in extract(place, **options)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("", "holds no rows"),
        ('{"input_ids": [1]', "malformed JSON"),
        ('{"input_ids": []}', "empty sequence"),
        ('{"input_ids": [100]}', "outside the vocabulary (0 to 99)"),
        ('{"input_ids": [1], "loss_mask": [1, 1]}', "loss_mask has 2 entries for 1"),
    ],
)
def test_bad_data_is_named_with_its_line(place: Path, row: str, fault: str) -> None:
    (place / "data.jsonl").write_text(row)
    error = extract(place)
    assert fault in error
    assert "data.jsonl:1: " in error or not row


def test_a_missing_option_is_named(place: Path) -> None:
    command = ("-m", "eagle3compat", "extract", "--data", "data.jsonl", "--out", "out")
    assert "--model" in the_error(call(*command, builds=place / "builds", folder=place))


def test_a_checkpoint_with_a_broken_config_is_named(place: Path) -> None:
    (place / "model" / "config.json").write_text("{")
    assert "config.json cannot be read" in extract(place)


def test_default_layers_of_a_small_model_name_the_option(place: Path) -> None:
    config = {**CONFIG, "num_hidden_layers": 6}
    (place / "model" / "config.json").write_text(json.dumps(config))
    assert "with --layers" in extract(place)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None,
    reason="Python goes on from a folder without code to the vLLM that is installed",
)
@pytest.mark.parametrize("package", ["vllm", "speculators"])
def test_a_folder_that_hides_a_build_is_named(place: Path, package: str) -> None:
    (place / "builds" / package / "__init__.py").unlink()
    assert f"builds/{package}" in extract(place)


def test_a_speculators_without_the_generator_names_the_native_route(tmp_path: Path) -> None:
    lay_out_builds(tmp_path / "builds", "0.5.0", generator=False)
    error = extract(tmp_path)
    assert "speculators 0.5.0" in error
    assert "extract_hidden_states" in error


def test_an_unknown_subcommand_is_named(place: Path) -> None:
    command = ("-m", "eagle3compat", "extrac")
    assert "extrac" in the_error(call(*command, builds=place / "builds"))


def test_a_traceback_is_shown_when_it_is_asked_for(place: Path) -> None:
    options = ("--model", "nowhere", "--data", "data.jsonl", "--out", "out")
    command = ("-m", "eagle3compat", "--traceback", "extract", *options)
    process = call(*command, builds=place / "builds", folder=place)
    assert process.returncode == 2
    assert "Traceback (most recent call last)" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: --model nowhere")


def test_version_tells_both_builds_and_their_folders_without_importing_them(place: Path) -> None:
    process = call("-m", "eagle3compat", "--version", builds=place / "builds")
    assert process.returncode == 0
    ours, vllm, speculators, *_ = process.stdout.splitlines()
    assert ours.startswith("eagle3compat ")
    assert "0.16.0" in vllm
    assert str(place / "builds" / "vllm") in vllm
    assert "0.3.0" in speculators
    assert str(place / "builds" / "speculators") in speculators


def test_version_works_without_the_builds(tmp_path: Path) -> None:
    for package in ("vllm", "speculators"):
        (tmp_path / package).mkdir()
    process = call("-m", "eagle3compat", "--version", builds=tmp_path)
    assert process.returncode == 0
    assert process.stderr == ""
