"""finished-requests: a prompt that is done makes room, here and in the workers."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import GENERATE_BY_HAND, GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.errors import Refusal
from eagle3compat.shim import Status
from eagle3compat.shims.finished_requests import SHIM


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
        assert "self.scheduler.schedule()" in line


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*GENERATE_BY_HAND),
        installed.edited(GENERATOR, "def generate(", "def extract("),
        installed.without(GENERATOR),
        installed.without_text(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def request(name: str, computed: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_computed_tokens=computed, num_prompt_tokens=10)


class Scheduler:
    """Keeps finished ids until the next output tells them, as vLLM's does."""

    def __init__(self, *requests: SimpleNamespace) -> None:
        self.running = list(requests)
        self.requests = {each.request_id: each for each in requests}
        self.finished_req_ids: set[str] = set()
        self.tokens = 1
        self.statuses: set[str] = set()

    def finish_requests(self, request_ids: Any, finished_status: str) -> None:
        self.statuses.add(finished_status)
        for name in request_ids:
            self.running.remove(self.requests.pop(name))
            self.finished_req_ids.add(name)

    def schedule(self) -> SimpleNamespace:
        told, self.finished_req_ids = self.finished_req_ids, set()
        return SimpleNamespace(
            total_num_scheduled_tokens=self.tokens if self.running else 0,
            finished_req_ids=told,
            running=[each.request_id for each in self.running],
        )


class Generator:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def generate(self, token_ids: Any) -> Any:
        if isinstance(token_ids, BaseException):
            raise token_ids
        return token_ids


@pytest.fixture
def module() -> ModuleType:
    return module_with(
        GENERATOR,
        Scheduler=Scheduler,
        RequestStatus=SimpleNamespace(FINISHED_ABORTED="aborted"),
        VllmHiddenStatesGenerator=Generator,
    )


def test_a_step_is_scheduled_without_requests_whose_prompts_are_done(module: ModuleType) -> None:
    with carried_out(module, SHIM.id):
        scheduler = module.Scheduler(request("done", 10), request("half", 5), request("new", 0))
        output = scheduler.schedule()
    assert output.running == ["half", "new"]
    assert output.finished_req_ids == {"done"}
    assert scheduler.statuses == {"aborted"}


def test_the_last_requests_are_told_with_the_next_step_that_is_executed(module: ModuleType) -> None:
    with carried_out(module, SHIM.id):
        scheduler = module.Scheduler(request("last", 10))
        not_executed = scheduler.schedule()
        assert not_executed.total_num_scheduled_tokens == 0
        scheduler.running = [request("next", 0)]
        assert scheduler.schedule().finished_req_ids == {"last"}
        assert scheduler.schedule().finished_req_ids == set()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_call_that_failed_leaves_no_request_behind(
    module: ModuleType, error: BaseException
) -> None:
    # chunked-prefill keeps requests that are not whole from being finished: both are live here.
    with carried_out(module, SHIM.id, "chunked-prefill"):
        scheduler = module.Scheduler(request("half", 5), request("new", 0))
        generator = module.VllmHiddenStatesGenerator(scheduler)
        with pytest.raises(type(error)):
            generator.generate(error)
    assert scheduler.requests == {}
    assert scheduler.running == []


def test_prompts_that_could_never_be_scheduled_are_refused_and_not_left(
    module: ModuleType,
) -> None:
    """speculators 0.3 hands out empty states for them, and the next call would find them there."""
    with carried_out(module, SHIM.id, "chunked-prefill"):
        scheduler = module.Scheduler(request("req_0_1", 0), request("req_0_2", 0))
        generator = module.VllmHiddenStatesGenerator(scheduler)
        with pytest.raises(Refusal, match="2 that cannot be scheduled, among them req_0_1"):
            generator.generate([[1], [2], [3]])
    assert scheduler.requests == {}


def test_a_call_that_succeeds_returns_what_it_did(module: ModuleType) -> None:
    with carried_out(module, SHIM.id):
        generator = module.VllmHiddenStatesGenerator(module.Scheduler())
        assert generator.generate([[1, 2]]) == [[1, 2]]
