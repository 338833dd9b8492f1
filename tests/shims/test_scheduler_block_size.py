"""scheduler-block-size: the block size of the KV cache, which became a parameter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from probing import GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.scheduler_block_size import SHIM

SCHEDULER = "vllm.v1.core.sched.scheduler"
PARAMETER = "        block_size: int,\n"


def test_needed_where_the_parameter_is_required(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert "block_size" in finding.reason
    assert "Scheduler(" in installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


@pytest.mark.parametrize("new", ["        block_size: int = 16,\n", ""])
def test_not_needed_where_it_is_optional_or_absent(installed: Builds, new: str) -> None:
    assert installed.edited(SCHEDULER, PARAMETER, new).probe(SHIM).status is Status.NOT_NEEDED


def test_not_needed_where_the_consumer_gives_it(later: Builds) -> None:
    assert later.probe(SHIM).status is Status.NOT_NEEDED


@pytest.mark.parametrize(
    "new",
    [
        "        block_size: int,\n        hash_block_size: int,\n",
        "        scheduler_block_size: int,\n",
        "        block_size: int,\n        /,\n",
    ],
)
def test_drift_where_the_parameters_changed_otherwise(installed: Builds, new: str) -> None:
    assert installed.edited(SCHEDULER, PARAMETER, new).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_scheduler_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.without(SCHEDULER),
        installed.without_text(SCHEDULER),
        installed.garbled(SCHEDULER),
        installed.edited(SCHEDULER, "class Scheduler(", "class BatchScheduler("),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


class Scheduler:
    def __init__(self, vllm_config: Any, kv_cache_config: str, block_size: int) -> None:
        self.kv_cache_config, self.block_size = kv_cache_config, block_size
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.finished: list[str] = []
        self.finished_req_ids: set[str] = set()

    def finish_requests(self, request_ids: Any, status: str) -> None:
        self.finished += request_ids

    def schedule(self) -> Any:
        return SimpleNamespace(total_num_scheduled_tokens=1, finished_req_ids=set())


CONFIG = SimpleNamespace(cache_config=SimpleNamespace(block_size=32))


def test_the_size_comes_from_the_cache_config() -> None:
    module = module_with(GENERATOR, Scheduler=Scheduler)
    with carried_out(module, SHIM.id):
        made = module.Scheduler(vllm_config=CONFIG, kv_cache_config="cache")
        given = module.Scheduler(vllm_config=CONFIG, kv_cache_config="cache", block_size=8)
    assert (made.kv_cache_config, made.block_size) == ("cache", 32)
    assert given.block_size == 8


def test_the_scheduler_is_still_vllms_own_class_by_name_and_kind() -> None:
    module = module_with(GENERATOR, Scheduler=Scheduler)
    with carried_out(module, SHIM.id):
        assert issubclass(module.Scheduler, Scheduler)
        assert module.Scheduler.__qualname__ == Scheduler.__qualname__
        assert module.Scheduler.__module__ == Scheduler.__module__


def test_three_shims_of_one_scheduler_work_together() -> None:
    module = module_with(
        GENERATOR,
        Scheduler=Scheduler,
        RequestStatus=SimpleNamespace(FINISHED_ABORTED="aborted"),
        VllmHiddenStatesGenerator=type("Generator", (), {"generate": lambda self: None}),
    )
    with carried_out(module, SHIM.id, "chunked-prefill", "finished-requests") as ledger:
        layers = [entry.shim_id for entry in ledger if entry.name == "Scheduler"]
        scheduler = module.Scheduler(vllm_config=CONFIG, kv_cache_config="cache")
        whole = SimpleNamespace(request_id="a", num_computed_tokens=3, num_prompt_tokens=3)
        cut = SimpleNamespace(request_id="b", num_computed_tokens=2, num_prompt_tokens=3)
        scheduler.running = [whole, cut]
        scheduler.requests = {"a": whole, "b": cut}
        scheduler.finish_requests(["b"], "aborted")
        scheduler.schedule()
    assert layers == [SHIM.id, "chunked-prefill", "finished-requests"]
    assert scheduler.block_size == 32
    assert scheduler.finished == ["a"]
