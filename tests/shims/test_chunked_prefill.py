"""chunked-prefill: requests live until their whole prompt is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from probing import GENERATE_BY_HAND, GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.chunked_prefill import SHIM


def test_needed_where_every_scheduled_request_is_aborted(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    line = installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
    assert "finish_requests" in line


def test_not_needed_where_requests_are_aborted_at_the_end(later: Builds) -> None:
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*GENERATE_BY_HAND),
        installed.edited(GENERATOR, "def generate(", "def extract("),
        installed.without(GENERATOR),
        installed.without_text(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


class Scheduler:
    def __init__(self, **computed: int) -> None:
        self.requests = {
            name: SimpleNamespace(num_computed_tokens=count, num_prompt_tokens=10)
            for name, count in computed.items()
        }
        self.finished: list[str] = []

    def finish_requests(self, request_ids: Any, finished_status: str) -> str:
        self.finished += request_ids
        return finished_status


@given(counts=st.lists(st.integers(0, 20), max_size=8))
def test_exactly_the_requests_with_a_whole_prompt_are_finished(counts: list[int]) -> None:
    computed = {f"req_0_{index}": count for index, count in enumerate(counts)}
    module = module_with(GENERATOR, Scheduler=Scheduler)
    with carried_out(module, SHIM.id):
        scheduler = module.Scheduler(**computed)
        assert scheduler.finish_requests(list(computed), "aborted") == "aborted"
    assert scheduler.finished == [name for name, count in computed.items() if count >= 10]


def test_a_single_id_may_be_given_as_text() -> None:
    module = module_with(GENERATOR, Scheduler=Scheduler)
    with carried_out(module, SHIM.id):
        scheduler = module.Scheduler(whole=10, cut=9)
        scheduler.finish_requests("whole", "aborted")
        scheduler.finish_requests("cut", "aborted")
    assert scheduler.finished == ["whole"]


def test_requests_that_are_gone_already_are_left_out() -> None:
    module = module_with(GENERATOR, Scheduler=Scheduler)
    with carried_out(module, SHIM.id):
        scheduler = module.Scheduler(whole=10)
        scheduler.finish_requests(["unknown", "whole"], "aborted")
    assert scheduler.finished == ["whole"]
