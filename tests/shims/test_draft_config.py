"""draft-config: the saved config names the verifier, and the layers as vLLM counts them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat.shim import DRAFT_MODEL, Status
from eagle3compat.shims.draft_config import SHIM

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 61, "architectures": ["DeepseekV3ForCausalLM"]},
}


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(DRAFT_MODEL).splitlines()[(finding.line or 0) - 1]
        assert "config.speculators_config.verifier" in line


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(DRAFT_MODEL, "self.fc = torch.nn.Linear(3 *", "self.fc = Linear(3 *"),
        installed.without(DRAFT_MODEL),
        installed.without_text(DRAFT_MODEL),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def made_config(checkpoint: dict[str, Any], ids: list[int] | None) -> Any:
    """The config of a draft that was made with these ids for that verifier."""

    class Draft:
        def __init__(self, config: Any) -> None:
            self.config = config

    configs = SimpleNamespace(get_config_dict=lambda path: (checkpoint, {}))
    module = module_with(DRAFT_MODEL, Eagle3DraftModel=Draft, PretrainedConfig=configs)
    verifier = SimpleNamespace(name_or_path="verifier", architectures=["LlamaForCausalLM"])
    config = SimpleNamespace(
        eagle_aux_hidden_state_layer_ids=ids, speculators_config=SimpleNamespace(verifier=verifier)
    )
    with carried_out(module, SHIM.id):
        return module.Eagle3DraftModel(config).config


def test_without_ids_those_of_the_default_extraction_are_written_and_told() -> None:
    with pytest.warns(UserWarning, match=r"\[3, 31, 59\].*layers \[2, 30, 58\]"):
        config = made_config(KIMI, None)
    assert config.eagle_aux_hidden_state_layer_ids == [3, 31, 59]
    assert config.speculators_config.verifier.architectures == KIMI["architectures"]


def test_ids_that_were_given_are_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made_config(KIMI, [3, 5, 6]).eagle_aux_hidden_state_layer_ids == [3, 5, 6]


def test_a_checkpoint_that_names_no_architecture_changes_nothing() -> None:
    config = made_config({"num_hidden_layers": 8}, [3, 5, 6])
    assert config.speculators_config.verifier.architectures == ["LlamaForCausalLM"]
