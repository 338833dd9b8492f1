"""backend-block-size: a block size that the attention backend can take."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import Status
from eagle3compat.shims.backend_block_size import SHIM

CACHE = "vllm.config.cache"
PLATFORM = "vllm.platforms.interface"
SCHEDULER = "vllm.v1.core.sched.scheduler"


def with_mark(builds: Builds) -> Builds:
    """A cache config that remembers whether its block size was asked for."""
    field = "    enable_prefix_caching: bool = True\n"
    return builds.edited(CACHE, field, f"{field}    user_specified_block_size: bool = False\n")


def with_choice(builds: Builds) -> Builds:
    """A platform that chooses a block size for its backend, unless one was asked for."""
    anchor = "    def check_and_update_config(cls"
    chooser = "    def update_block_size_for_backend(cls, vllm_config): ...\n\n    @classmethod\n"
    return builds.edited(PLATFORM, anchor, chooser + anchor)


def test_not_needed_where_vllm_corrects_the_size(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NOT_NEEDED
        assert "CacheConfig(" in builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


def test_needed_where_a_size_that_is_asked_for_is_kept(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = with_mark(with_choice(builds)).probe(SHIM)
        assert finding.status is Status.NEEDED
        assert "backend" in (finding.conditional or "")


def test_not_needed_where_the_consumer_asks_for_none(installed: Builds) -> None:
    silent = installed.edited(GENERATOR, "block_size=VLLM_BLOCK_SIZE,", "")
    assert with_mark(with_choice(silent)).probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_only_half_of_it_is_there(installed: Builds) -> None:
    for builds in (with_mark(installed), with_choice(installed)):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_drift_where_the_scheduler_takes_no_size(installed: Builds) -> None:
    kept = with_mark(with_choice(installed))
    without = kept.edited(SCHEDULER, "        block_size: int,\n", "")
    assert without.probe(SHIM).status is Status.DRIFT


def test_drift_where_vllm_cannot_be_read(installed: Builds) -> None:
    for module in (CACHE, PLATFORM, SCHEDULER):
        for builds in (installed.without(module), installed.without_text(module)):
            assert builds.probe(SHIM).status is Status.DRIFT


class Scheduler:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, block_size: int, **more: Any):
        self.given = (vllm_config, kv_cache_config, block_size, more)


@pytest.fixture
def module() -> ModuleType:
    return module_with(GENERATOR, Scheduler=Scheduler, CacheConfig=Recorder("made"))


def cache_of(*sizes: int) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    return SimpleNamespace(kv_cache_groups=groups)


def test_no_size_is_asked_for(module: ModuleType) -> None:
    config = module.CacheConfig
    with carried_out(module, SHIM.id):
        assert module.CacheConfig(block_size=16, gpu_memory_utilization=0.8) == "made"
    assert config.keywords == {"gpu_memory_utilization": 0.8}


@pytest.mark.parametrize("asked", [{}, {"block_size": 16}])
def test_the_scheduler_gets_the_size_of_the_groups(
    module: ModuleType, asked: dict[str, int]
) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=None))
    cache = cache_of(128, 32)
    with carried_out(module, SHIM.id):
        scheduler = module.Scheduler(vllm_config=config, kv_cache_config=cache, log=1, **asked)
    assert scheduler.given == (config, cache, 32, {"log": 1})
    assert config.cache_config.block_size == 32
    assert settled.choices()[SHIM.id] == "32 tokens a block"


def test_it_goes_before_the_size_of_the_cache_config(module: ModuleType) -> None:
    """scheduler-block-size reads the config where the consumer gives no size."""
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    with carried_out(module, SHIM.id, "scheduler-block-size"):
        scheduler = module.Scheduler(vllm_config=config, kv_cache_config=cache_of(64))
    assert scheduler.given[2] == 64
