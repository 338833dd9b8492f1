"""target-norm: the head is fed the last state behind the verifier's final norm."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import DRAFT_MODEL, Status
from eagle3compat.shims.target_norm import SHIM

TARGETS = "targets = self.verifier_lm_head(verifier_last_hidden_states)"
STATES = "verifier_last_hidden_states"


def test_needed_where_the_head_is_fed_the_stored_state(installed: Builds, later: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert TARGETS in installed.text(DRAFT_MODEL).splitlines()[(finding.line or 0) - 1]
    assert later.probe(SHIM).status is Status.NOT_NEEDED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (TARGETS, TARGETS.replace("head(verifier", "head(norm(verifier") + ")"),
        ("# LM HEADS", "# HEADS"),
    ],
)
def test_drift_where_either_function_was_edited(installed: Builds, old: str, new: str) -> None:
    assert installed.edited(DRAFT_MODEL, old, new).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_module_cannot_be_read(installed: Builds) -> None:
    for builds in (installed.without(DRAFT_MODEL), installed.without_text(DRAFT_MODEL)):
        assert builds.probe(SHIM).status is Status.DRIFT


def made_draft(names: dict[str, Any]) -> tuple[ModuleType, Any]:
    """The consumer's module, and a draft that hands its targets' states back."""
    torch = pytest.importorskip("torch")

    class Draft(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._setup_embeddings_and_lm_heads(SimpleNamespace(name_or_path="verifier"), None)

        def _setup_embeddings_and_lm_heads(self, config: Any, t2d: Any) -> None:
            self.embed_tokens = torch.nn.Embedding(3, 2)

        def forward(self, a: Any, b: Any, c: Any = 0, d: Any = 0, e: Any = 0, **states: Any) -> Any:
            return states.get(STATES)

    def load(asked: list[str], path: str) -> dict[str, Any]:
        assert path == "verifier"
        return {name: names[name] for name in asked if name in names}

    config = {"text_config": {"rms_norm_eps": 0.5}}
    configs = SimpleNamespace(get_config_dict=lambda path: (config, {}))
    module = module_with(
        DRAFT_MODEL,
        Eagle3DraftModel=Draft,
        load_model_layers=load,
        PretrainedConfig=configs,
        torch=torch,
    )
    return module, Draft


def test_states_are_normalised_as_the_verifier_does_it() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    module, draft = made_draft({"model.norm.weight": weight})
    states = torch.tensor([[[3.0, 4.0]]])
    with carried_out(module, SHIM.id):
        made = draft()
        found = made(0, 0, **{STATES: states})
        assert made(0, 0) is None
        assert list(made.state_dict()) == ["embed_tokens.weight"], "checkpoints stay as they are"
    expected = states / (12.5 + 0.5) ** 0.5 * torch.tensor([1.0, 3.0])
    torch.testing.assert_close(found, expected)
    assert states.tolist() == [[[3.0, 4.0]]]


def test_a_verifier_without_a_final_norm_is_refused() -> None:
    module, draft = made_draft({})
    with carried_out(module, SHIM.id), pytest.raises(Refusal, match=r"model\.norm\.weight"):
        draft()
