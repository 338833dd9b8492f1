"""Drafts that vLLM would serve without a word, and badly, are refused from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from handmade_draft import DRAFT_VOCABULARY, HIDDEN, LAYER_IDS, VOCABULARY, write_draft

from eagle3compat.errors import InputError
from eagle3compat.kimi.served_draft import read_served_draft
from eagle3compat.kimi.verifier import Verifier, read_verifier
from eagle3compat.tiny import write_tiny_kimi

pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    folder = tmp_path_factory.mktemp("verifier") / "model"
    write_tiny_kimi(folder)
    return read_verifier(folder)


def test_a_draft_that_fits_is_read(verifier: Verifier, tmp_path: Path) -> None:
    draft = read_served_draft(write_draft(tmp_path / "draft"), verifier)
    assert draft.layer_ids == tuple(LAYER_IDS)
    assert (draft.vocab_size, draft.draft_tokens) == (DRAFT_VOCABULARY, 3)


def test_layer_ids_that_are_null_are_refused_with_those_to_write(
    verifier: Verifier, tmp_path: Path
) -> None:
    draft = write_draft(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(InputError, match=r"no eagle_aux_hidden_state_layer_ids.*\[3, 5, 6\]"):
        read_served_draft(draft, verifier)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("3,5,6", "expected a list of integers"),
        ([3, 5, True], "expected a list of integers"),
        ([0, 5, 6], "expected rising ids from 1 to 8"),
        ([3, 5, 9], "expected rising ids from 1 to 8"),
        ([5, 3, 6], "expected rising ids from 1 to 8"),
        ([3, 3, 6], "expected rising ids from 1 to 8"),
    ],
)
def test_layer_ids_that_vllm_would_take_otherwise_are_refused(
    verifier: Verifier, tmp_path: Path, ids: Any, message: str
) -> None:
    draft = write_draft(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=ids)
    with pytest.raises(InputError, match=message):
        read_served_draft(draft, verifier)


@pytest.mark.parametrize("ids", [[2, 4, 5], [4, 6, 7]])
def test_layer_ids_that_are_one_off_those_of_its_training_are_refused(
    verifier: Verifier, tmp_path: Path, ids: list[int]
) -> None:
    draft = write_draft(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=ids)
    (draft / "training.json").write_text(json.dumps({"layers": [2, 4, 5, 7]}))
    with pytest.raises(InputError, match=r"outputs of the layers \[2, 4, 5\].* \[3, 5, 6\]"):
        read_served_draft(draft, verifier)


def test_layer_ids_of_its_training_are_taken(verifier: Verifier, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft")
    (draft / "training.json").write_text(json.dumps({"layers": [2, 4, 5, 7]}))
    assert read_served_draft(draft, verifier).layer_ids == (3, 5, 6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", [HIDDEN, 2 * HIDDEN]),
        ("fc.weight", None),
        ("lm_head.weight", [DRAFT_VOCABULARY + 1, HIDDEN]),
        ("d2t", [DRAFT_VOCABULARY - 1]),
        ("d2t", None),
        ("t2d", [VOCABULARY + 1]),
        ("embed_tokens.weight", [VOCABULARY + 1, HIDDEN]),
    ],
)
def test_another_vocabulary_or_another_size_is_refused(
    verifier: Verifier, tmp_path: Path, name: str, shape: list[int] | None
) -> None:
    draft = write_draft(tmp_path / "draft", shapes={name: shape})
    with pytest.raises(InputError, match=f"{name} is .*expected"):
        read_served_draft(draft, verifier)


def test_a_draft_with_all_of_the_verifiers_tokens_needs_no_map(
    verifier: Verifier, tmp_path: Path
) -> None:
    shapes: dict[str, list[int] | None] = {
        "lm_head.weight": [VOCABULARY, HIDDEN],
        "d2t": None,
        "t2d": None,
        "embed_tokens.weight": None,
    }
    draft = write_draft(tmp_path / "draft", shapes=shapes, draft_vocab_size=VOCABULARY)
    assert read_served_draft(draft, verifier).vocab_size == VOCABULARY


def test_a_map_beside_all_of_the_verifiers_tokens_is_refused(
    verifier: Verifier, tmp_path: Path
) -> None:
    shapes: dict[str, list[int] | None] = {
        "lm_head.weight": [VOCABULARY, HIDDEN],
        "d2t": [VOCABULARY],
    }
    draft = write_draft(tmp_path / "draft", shapes=shapes, draft_vocab_size=VOCABULARY)
    with pytest.raises(InputError, match="smaller --draft-vocab-size"):
        read_served_draft(draft, verifier)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle"}, "expected 'eagle3'"),
        ({"draft_vocab_size": None}, "draft_vocab_size = None"),
        ({"speculators_config": {}}, "lacks 'proposal_methods'"),
        ({"transformer_layer_config": None}, "lacks"),
    ],
)
def test_a_config_that_vllm_cannot_use_is_refused(
    verifier: Verifier, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_served_draft(write_draft(tmp_path / "draft", **changes), verifier)


def test_a_folder_that_is_not_there_is_refused(verifier: Verifier, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        read_served_draft(tmp_path / "nowhere", verifier)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "holds list"),
        ("model.safetensors", None, "is its training done"),
        ("model.safetensors", "half of a file", "no safetensors file"),
    ],
)
def test_a_file_that_is_missing_or_broken_is_refused(
    verifier: Verifier, tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    draft = write_draft(tmp_path / "draft")
    (draft / file).unlink()
    if content is not None:
        (draft / file).write_text(content)
    with pytest.raises(InputError, match=message):
        read_served_draft(draft, verifier)
