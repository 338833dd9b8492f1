"""required-norm: a draft is not trained on targets without the final norm."""

from __future__ import annotations

import pytest
from probing import Builds
from standins import Recorder, carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import DRAFT_MODEL, Status
from eagle3compat.shims.required_norm import SHIM

NAMES = ["embed_tokens.weight", "lm_head.weight", "model.norm.weight"]


def test_needed_where_a_missing_norm_is_warned_of(installed: Builds, later: Builds) -> None:
    finding = later.probe(SHIM)
    assert finding.status is Status.NEEDED
    line = later.text(DRAFT_MODEL).splitlines()[(finding.line or 0) - 1]
    assert "Could not find final norm weights" in line
    assert installed.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(later: Builds) -> None:
    for builds in (
        later.edited(DRAFT_MODEL, "Using default initialization", "Using initialization"),
        later.without(DRAFT_MODEL),
        later.without_text(DRAFT_MODEL),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_a_missing_norm_is_refused_and_a_found_one_given() -> None:
    whole = dict.fromkeys(NAMES, "tensor")
    without = dict.fromkeys(NAMES[:2], "tensor")
    module = module_with(DRAFT_MODEL, load_model_layers=Recorder(whole, without, {}))
    with carried_out(module, SHIM.id):
        assert module.load_model_layers(NAMES, "verifier") == whole
        with pytest.raises(Refusal, match=r"verifier: expected a tensor model\.norm\.weight"):
            module.load_model_layers(NAMES, "verifier")
        assert module.load_model_layers(NAMES[:2], "verifier") == {}, "nobody asked for a norm"
