"""Drafts that a trained one is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from handmade_draft import DRAFT_VOCABULARY, SHAPES, VOCABULARY, write_draft

from eagle3compat.errors import InputError
from eagle3compat.kimi.other_drafts import write_draft_with_layers, write_untrained_draft
from eagle3compat.kimi.served_draft import read_served_draft
from eagle3compat.kimi.verifier import read_verifier
from eagle3compat.tiny import write_tiny_kimi

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other_drafts") / "model"
    write_tiny_kimi(folder)
    return folder


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A draft of the tokens from 50 to 149, all of its other weights zero."""
    draft = write_draft(tmp_path / "trained")
    tensors = safetensors.load_file(draft / "model.safetensors")
    tensors["d2t"] = torch.full((DRAFT_VOCABULARY,), 50)
    tensors["t2d"][50 : 50 + DRAFT_VOCABULARY] = True
    safetensors.save_file(tensors, draft / "model.safetensors")
    return draft


def test_an_untrained_draft_fits_as_the_trained_one_does(
    model: Path, trained: Path, tmp_path: Path
) -> None:
    write_untrained_draft(model, trained, tmp_path / "untrained")
    verifier = read_verifier(model)
    untrained = read_served_draft(tmp_path / "untrained", verifier)
    assert untrained.layer_ids == read_served_draft(trained, verifier).layer_ids
    tensors = safetensors.load_file(tmp_path / "untrained" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == SHAPES


def test_an_untrained_draft_has_the_verifiers_output_rows_of_its_tokens(
    model: Path, trained: Path, tmp_path: Path
) -> None:
    write_untrained_draft(model, trained, tmp_path / "untrained")
    rows = safetensors.load_file(tmp_path / "untrained" / "model.safetensors")["lm_head.weight"]
    for shard in model.glob("*.safetensors"):
        if "language_model.lm_head.weight" in (verifier := safetensors.load_file(shard)):
            head = verifier["language_model.lm_head.weight"].float()
    assert head.shape[0] == VOCABULARY
    assert torch.equal(rows, head[50 : 50 + DRAFT_VOCABULARY])


def test_an_untrained_draft_is_drawn_from_its_seed(
    model: Path, trained: Path, tmp_path: Path
) -> None:
    drawn = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_untrained_draft(model, trained, tmp_path / name, seed=seed)
        drawn[name] = safetensors.load_file(tmp_path / name / "model.safetensors")
    assert all(torch.equal(drawn["a"][name], drawn["b"][name]) for name in SHAPES)
    assert not torch.equal(drawn["a"]["fc.weight"], drawn["c"]["fc.weight"])
    assert drawn["a"]["fc.weight"].abs().max() <= SHAPES["fc.weight"][1] ** -0.5
    assert drawn["a"]["norm.weight"].tolist() == [1.0] * SHAPES["norm.weight"][0]


def test_a_copy_with_other_layers_differs_in_them_alone(trained: Path, tmp_path: Path) -> None:
    write_draft_with_layers(trained, tmp_path / "copy", [2, 4, 5])
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (trained, tmp_path / "copy")
    ]
    assert configs[1].pop("eagle_aux_hidden_state_layer_ids") == [2, 4, 5]
    assert configs[0].pop("eagle_aux_hidden_state_layer_ids") == [3, 5, 6]
    assert configs[0] == configs[1]
    weights = [
        (folder / "model.safetensors").read_bytes() for folder in (trained, tmp_path / "copy")
    ]
    assert weights[0] == weights[1]


def test_another_number_of_layers_and_a_folder_in_use_are_refused(
    trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="expected as many as"):
        write_draft_with_layers(trained, tmp_path / "copy", [2, 4])
    with pytest.raises(InputError, match="expected a new folder"):
        write_draft_with_layers(trained, trained, [2, 4, 5])
