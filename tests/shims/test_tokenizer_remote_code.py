"""tokenizer-remote-code: the verifier's tokenizer is trusted as its model is."""

from __future__ import annotations

import pytest
from probing import CONSTRUCT_BY_HAND, GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.tokenizer_remote_code import SHIM


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
        assert "AutoTokenizer.from_pretrained" in line


def test_config_and_model_are_trusted_by_the_consumer_itself(
    installed: Builds, later: Builds
) -> None:
    # The shim extends to the tokenizer what the consumer grants to the same path anyway.
    for builds in (installed, later):
        assert builds.text(GENERATOR).count("trust_remote_code=True") == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        CONSTRUCT_BY_HAND[1:],
        ("from_pretrained(model_path)", "from_pretrained(model_path, trust_remote_code=False)"),
    ],
)
def test_drift_where_the_function_was_edited(installed: Builds, old: str, new: str) -> None:
    assert installed.edited(GENERATOR, old, new).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_function_cannot_be_read(installed: Builds) -> None:
    for builds in (installed.without(GENERATOR), installed.without_text(GENERATOR)):
        assert builds.probe(SHIM).status is Status.DRIFT


class AutoTokenizer:
    from_pretrained = Recorder("tokenizer")
    register = Recorder("registered")


def test_the_tokenizer_is_loaded_with_its_code() -> None:
    AutoTokenizer.from_pretrained.calls.clear()
    module = module_with(GENERATOR, AutoTokenizer=AutoTokenizer)
    with carried_out(module, SHIM.id):
        assert module.AutoTokenizer.from_pretrained("path", use_fast=False) == "tokenizer"
        module.AutoTokenizer.from_pretrained("path", trust_remote_code=False)
        assert module.AutoTokenizer.register() == "registered"
    assert AutoTokenizer.from_pretrained.calls == [
        (("path",), {"use_fast": False, "trust_remote_code": True}),
        (("path",), {"trust_remote_code": False}),
    ]


def test_transformers_own_class_is_not_touched() -> None:
    own = AutoTokenizer.from_pretrained
    with carried_out(module_with(GENERATOR, AutoTokenizer=AutoTokenizer), SHIM.id):
        assert AutoTokenizer.from_pretrained is own
