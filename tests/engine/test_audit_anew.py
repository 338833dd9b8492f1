"""Samples extracted anew by a real engine agree with right files, and only with those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import run_script

from eagle3compat.kimi.storage import sample_path
from eagle3compat.reference import ReferenceModel

pytestmark = pytest.mark.engine

LAYERS = (2, 4, 5, 7)
# None begins like another, so that nothing but an engine can tell what their rows should be.
TEXTS = [[first, *range(first, first + length)] for first, length in ((3, 30), (40, 20), (80, 33))]


def write_files(model: Path, folder: Path) -> None:
    """Right files by transformers, but for two rows of an auxiliary layer of sample 1."""
    import torch

    folder.mkdir()
    states = ReferenceModel.load(model).hidden_states(TEXTS, LAYERS)
    states[1][1][[12, 13]] = states[1][1][[13, 12]]
    for index, (text, layers) in enumerate(zip(TEXTS, states, strict=True)):
        content = {
            "input_ids": torch.tensor(text),
            "loss_mask": torch.ones(len(text), dtype=torch.long),
            "hidden_states": layers,
        }
        torch.save(content, sample_path(folder, index))


def test_a_changed_sample_is_named_and_no_other(kimi: Path, tmp_path: Path) -> None:
    write_files(kimi, tmp_path / "out")
    command = ("-m", "eagle3compat", "audit", tmp_path / "out", "--json", "--again", "1")
    done = run_script(*command, "--model", kimi, "--layers", "2,4,5,7")
    assert done.returncode == 1, done.stderr[-3000:]
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert (finding["sample"], finding["kind"]) == (1, "extracted anew")
    assert finding["what"].startswith("layer 4: rows 12-13 of 21 differ from the same, extracted")
    assert report["again"]["samples"] == [0, 1, 2]
    for layer in ("2", "5", "7"):
        right = report["again"]["layers"][layer]
        assert 0 < right["largest_error"] < right["explained_by_rounding"]
