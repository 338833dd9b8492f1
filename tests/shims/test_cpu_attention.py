"""cpu-attention: on a CPU the draft attends densely, with the very mask of flex attention."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import Status
from eagle3compat.shims.cpu_attention import SHIM

ATTENTION = "speculators.models.eagle3.attention"
CALL = "flex_attention_output = flex_attention("


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert finding.conditional
        assert CALL in builds.text(ATTENTION).splitlines()[(finding.line or 0) - 1]


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(ATTENTION, "score_mod=None", "score_mod=module.score"),
        installed.without(ATTENTION),
        installed.without_text(ATTENTION),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def attention_module(flex: Any) -> ModuleType:
    torch = pytest.importorskip("torch")
    return module_with(ATTENTION, torch=torch, flex_attention=flex)


def test_it_attends_as_flex_attention_does_and_gradients_pass() -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    shapes = ((1, 4, 6, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    query, key, value = (torch.randn(*shape) for shape in shapes)

    def mask(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return (row >= column) | (column % 6 == row)

    block_mask = create_block_mask(mask, None, None, 6, 12, device="cpu")
    options = {"score_mod": None, "block_mask": block_mask, "enable_gqa": True, "scale": 0.3}
    with torch.no_grad():
        expected = flex_attention(query, key, value, **options)
    query.requires_grad_(True)
    with carried_out(module := attention_module(flex_attention), SHIM.id):
        found = module.flex_attention(query, key, value, **options)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), expected)
    assert query.grad is not None
    assert "dense" in settled.choices()[SHIM.id]


@pytest.mark.parametrize(("device", "score"), [("cuda", None), ("cpu", "a score of its own")])
def test_elsewhere_it_is_flex_attention(device: str, score: Any) -> None:
    flex = Recorder("attended")
    query = SimpleNamespace(device=SimpleNamespace(type=device))
    with carried_out(module := attention_module(flex), SHIM.id):
        found = module.flex_attention(query, "key", "value", score_mod=score, block_mask="mask")
    assert found == "attended"
    options = {"score_mod": score, "block_mask": "mask", "scale": None, "enable_gqa": False}
    assert flex.calls == [((query, "key", "value"), options)]
