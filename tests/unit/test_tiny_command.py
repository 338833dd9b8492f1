"""``eagle3compat tiny-kimi`` as a user calls it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import call, the_error
from tiny_kimi_files import digests, read_json

from eagle3compat.tiny import Variant, write_tiny_kimi

pytest.importorskip("numpy")


def tiny_kimi(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call("-m", "eagle3compat", "tiny-kimi", *arguments, builds=folder, folder=folder)


def test_it_writes_what_the_function_writes(tmp_path: Path) -> None:
    done = tiny_kimi(tmp_path, "model", "--seed", "5", "--mla-gpu", "--yarn")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Tiny Kimi-K2.5, seed 5: model")
    write_tiny_kimi(tmp_path / "same", seed=5, variant=Variant(mla_gpu=True, yarn=True))
    assert digests(tmp_path / "model") == digests(tmp_path / "same")


def test_text_only_writes_a_plain_model(tmp_path: Path) -> None:
    done = tiny_kimi(tmp_path, "model", "--text-only")
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "model" / "config.json")["model_type"] == "deepseek_v3"


def test_a_folder_in_use_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").touch()
    assert "found a folder with files in it" in the_error(tiny_kimi(tmp_path, "model"))


def test_a_negative_seed_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = tiny_kimi(tmp_path, "model", "--seed=-1")
    assert "seed: expected 0 or more" in the_error(done)
    assert not (tmp_path / "model").exists()
