"""verifier-weights: embeddings and head are found below a wrapper's prefix."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import DRAFT_MODEL, Status
from eagle3compat.shims.verifier_weights import SHIM

LOADING = "speculators.utils.loading"
NAMES = ["model.embed_tokens.weight", "lm_head.weight"]


def test_needed_where_tensors_are_looked_up_by_their_whole_names(
    installed: Builds, later: Builds
) -> None:
    assert installed.probe(SHIM).status is Status.NEEDED
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(LOADING, "available = set(f.keys())", "available = list(f.keys())"),
        installed.without(LOADING),
        installed.without_text(LOADING),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def load_by_exact_name(names: list[str], checkpoint: str) -> dict[str, str]:
    index = json.loads(Path(checkpoint, "model.safetensors.index.json").read_text())
    return {name: f"tensor {name}" for name in names if name in index["weight_map"]}


def checkpoint(folder: Path, *names: str) -> str:
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The consumer's module, and the one that finds files."""

    def resolve(checkpoint: str, name: str) -> Path:
        return Path(checkpoint, name)

    loading = module_with(LOADING, _resolve_file=resolve, EntryNotFoundError=KeyError)
    monkeypatch.setitem(sys.modules, "speculators", module_with("speculators"))
    utils = module_with("speculators.utils", loading=loading)
    monkeypatch.setitem(sys.modules, "speculators.utils", utils)
    monkeypatch.setitem(sys.modules, LOADING, loading)
    return module_with(DRAFT_MODEL, load_model_layers=load_by_exact_name)


def load(module: ModuleType, folder: str) -> Any:
    with carried_out(module, SHIM.id):
        return module.load_model_layers(NAMES, folder)


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.text."])
def test_tensors_come_under_the_names_that_were_asked_for(
    module: ModuleType, tmp_path: Path, prefix: str
) -> None:
    names = [prefix + name for name in NAMES]
    found = load(module, checkpoint(tmp_path, *names, "vision_tower.norm.weight"))
    assert found == {name: f"tensor {prefix}{name}" for name in NAMES}


def test_a_head_that_is_tied_to_the_embeddings_is_left_to_the_consumer(
    module: ModuleType, tmp_path: Path
) -> None:
    assert list(load(module, checkpoint(tmp_path, NAMES[0]))) == NAMES[:1]


def test_a_checkpoint_without_embeddings_is_refused(module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"embed_tokens.*found none among 1 tensors"):
        load(module, checkpoint(tmp_path, NAMES[1]))


def test_two_that_could_be_meant_are_refused(module: ModuleType, tmp_path: Path) -> None:
    names = [f"{prefix}.{name}" for prefix in ("language_model", "other_model") for name in NAMES]
    with pytest.raises(Refusal, match=r"language_model\.model.*other_model\.model"):
        load(module, checkpoint(tmp_path, *names))
