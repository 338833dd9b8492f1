"""``eagle3compat prepare`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import call, lay_out_builds, the_error


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_builds(tmp_path_factory.mktemp("builds"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "num_hidden_layers": 8,
        "hidden_size": 16,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_row_is_accounted_for(builds: Path, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, 2, 3, 4, 5]}\n{\n')
    options = ("--model", model, "--data", data, "--out", tmp_path / "out", "--max-model-len", "4")
    shown = call("-m", "eagle3compat", "prepare", *options, builds=builds)
    assert shown.returncode == 0, shown.stderr
    lines = dict(line.split(None, 1) for line in shown.stdout.splitlines() if line[0] != " ")
    assert lines["rows"] == "3"
    assert lines["samples"].startswith("1 in ")
    assert lines["tokens"] == "2, of which 2 are marked"
    assert "2: 5 tokens, and one more is sampled" in shown.stdout
    assert "dropped      no row that can be read: 1\n" in shown.stdout
    assert "dropped      longer than the model length: 1\n" in shown.stdout
    again = call("-m", "eagle3compat", "prepare", *options, builds=builds)
    assert again.returncode == 0
    assert "resumed      1 parts were there\n" in again.stdout


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"--model": "/nowhere"}, "no such folder"),
        ({"--data": "/nowhere.jsonl"}, "cannot be read"),
        ({"--data": "/proc/version"}, "expected a file of .jsonl"),
        ({"--max-model-len": "4097"}, "has 4096 positions"),
        ({"--out": "/proc/version"}, "cannot be used"),
        ({"--processes": "0"}, "greater than or equal to 1"),
    ],
)
def test_bad_input_is_one_line(
    builds: Path, model: Path, tmp_path: Path, changed: dict[str, str], fault: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [1]}\n')
    options = {"--model": str(model), "--data": str(data), "--out": str(tmp_path / "out")}
    arguments = [part for option in {**options, **changed}.items() for part in option]
    shown = call("-m", "eagle3compat", "prepare", *arguments, builds=builds)
    assert fault in the_error(shown)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_tokenizer_is_said_to_have_none(
    builds: Path, model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    options = ("--model", model, "--data", data, "--out", tmp_path / "out")
    shown = call("-m", "eagle3compat", "prepare", *options, builds=builds, HF_HUB_OFFLINE="1")
    assert shown.returncode == 2
    assert "its tokenizer cannot be loaded" in shown.stderr.splitlines()[-1]
