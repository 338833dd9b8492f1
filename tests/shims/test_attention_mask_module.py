"""attention-mask-module: a module that transformers removed, for those who import it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import Status
from eagle3compat.shims.attention_mask_module import SHIM

EARLY = "speculators.utils.pydantic_utils"
MODELS = "speculators.models.eagle"
MASKS = "transformers.modeling_attn_mask_utils"
FUNCTION = "_prepare_4d_causal_attention_mask"
IMPORT = f"from {MASKS} import {FUNCTION}"


def test_needed_where_the_module_is_gone(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.without(MASKS).probe(SHIM)
        assert finding.status is Status.NEEDED
        assert IMPORT in builds.text(MODELS).splitlines()[(finding.line or 0) - 1]


def test_not_needed_where_the_module_is_there(installed: Builds) -> None:
    assert installed.probe(SHIM).status is Status.NOT_NEEDED


def test_not_needed_where_the_consumer_does_not_import_it(installed: Builds) -> None:
    without = installed.edited(MODELS, IMPORT, f"{FUNCTION} = None")
    assert without.without(MASKS).probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_module_has_no_such_function(installed: Builds) -> None:
    renamed = installed.edited(MASKS, f"def {FUNCTION}(", "def prepare_mask(")
    assert renamed.probe(SHIM).status is Status.DRIFT


def test_drift_where_the_consumer_cannot_be_read(installed: Builds) -> None:
    for builds in (installed.without(MODELS), installed.without_text(MODELS)):
        assert builds.probe(SHIM).status is Status.DRIFT


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MASKS, raising=False)


def test_the_module_can_be_imported_from_while_patched(loaded: None) -> None:
    with carried_out(module_with(EARLY), SHIM.id) as ledger:
        stand_in = importlib.import_module(MASKS)
        assert callable(getattr(stand_in, FUNCTION))
        assert [entry.place for entry in ledger] == [f"sys.modules[{MASKS!r}]"]
    assert MASKS not in sys.modules


def test_a_call_is_refused_with_what_to_do(loaded: None) -> None:
    with carried_out(module_with(EARLY), SHIM.id):
        function = getattr(importlib.import_module(MASKS), FUNCTION)
        with pytest.raises(Refusal, match="EAGLE-1 kind need transformers before"):
            function(None, (1, 2), None, 0)


def test_a_module_that_was_loaded_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType(MASKS)
    monkeypatch.setitem(sys.modules, MASKS, own)
    with carried_out(module_with(EARLY), SHIM.id):
        assert sys.modules[MASKS] is not own
    assert sys.modules[MASKS] is own
