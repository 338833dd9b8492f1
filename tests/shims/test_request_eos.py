"""request-eos: a parameter of vLLM's Request that was removed."""

from __future__ import annotations

import pytest
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.request_eos import SHIM

REQUEST = "vllm.v1.request"
PARAMETER = "        eos_token_id: int | None,\n"


def test_not_needed_where_the_parameter_is_taken(installed: Builds, later: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NOT_NEEDED
    assert "Request(" in installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_needed_where_the_parameter_is_gone(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.edited(REQUEST, PARAMETER, "").probe(SHIM)
        assert finding.status is Status.NEEDED
        assert "eos_token_id" in finding.reason


@pytest.mark.parametrize(
    "new",
    [
        "        end_token_id: int | None,\n",
        "        eos_token_id: int | None,\n        model_name: str,\n",
    ],
)
def test_drift_where_something_else_is_asked_for(installed: Builds, new: str) -> None:
    assert installed.edited(REQUEST, PARAMETER, new).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_class_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.without(REQUEST),
        installed.without_text(REQUEST),
        installed.garbled(REQUEST),
        installed.edited(REQUEST, "class Request:", "class EngineRequest:"),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_the_keyword_is_dropped_and_the_rest_is_kept() -> None:
    request = Recorder("made")
    module = module_with(GENERATOR, Request=request)
    with carried_out(module, SHIM.id):
        assert module.Request(request_id="req_0_0", eos_token_id=2, pooling_params=None) == "made"
    assert request.keywords == {"request_id": "req_0_0", "pooling_params": None}
