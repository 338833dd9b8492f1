"""memory-query: what the KV cache is sized from where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import Status
from eagle3compat.shims.memory_query import SHIM, free_memory

GIB = 1 << 30


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def test_needed_for_both_ways_of_asking(installed: Builds, later: Builds) -> None:
    for builds, asked in ((installed, "torch.cuda.mem_get_info()"), (later, "mem_get_info()")):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert "GPU" in (finding.conditional or "")
        assert asked in builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


def test_drift_where_something_else_is_asked(installed: Builds) -> None:
    for builds in (
        installed.edited(GENERATOR, "torch.cuda.mem_get_info()", "torch.accelerator.memory()"),
        installed.without(GENERATOR),
        installed.without_text(GENERATOR),
        installed.garbled(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_memory_is_the_hosts(no_limit: None) -> None:
    free, total = free_memory()
    assert 0 < free <= total
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@given(limit=st.floats(0.001, 4096))
def test_vllms_own_limit_caps_it(limit: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", str(limit))
        free, total = free_memory()
    assert 0 < free <= min(int(limit * GIB), total)


@pytest.mark.parametrize("unset", ["", "0"])
def test_a_limit_of_nothing_is_none(monkeypatch: pytest.MonkeyPatch, unset: str) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", unset)
    assert free_memory()[0] > 0


def torch_with(gpu: bool, answer: Any) -> Any:
    cuda = module_with("torch.cuda", is_available=lambda: gpu, mem_get_info=answer)
    return module_with("torch", cuda=cuda, Tensor=list)


def test_the_host_is_asked_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    query = Recorder(AssertionError)
    module = module_with(GENERATOR, torch=torch_with(False, query))
    with carried_out(module, SHIM.id):
        free, total = module.torch.cuda.mem_get_info()
    assert 0 < free <= GIB < total
    assert query.calls == []
    assert "no GPU" in settled.choices()[SHIM.id]


def test_a_gpu_is_asked_where_there_is_one() -> None:
    query = Recorder((5, 9))
    module = module_with(GENERATOR, torch=torch_with(True, query))
    with carried_out(module, SHIM.id):
        assert module.torch.cuda.mem_get_info() == (5, 9)
    assert "GPU was asked" in settled.choices()[SHIM.id]


def test_the_rest_of_torch_is_as_it_was() -> None:
    torch = torch_with(False, Recorder())
    module = module_with(GENERATOR, torch=torch)
    with carried_out(module, SHIM.id):
        assert module.torch.Tensor is list
        assert module.torch.cuda.is_available() is False
    assert module.torch is torch


def test_torch_itself_is_not_touched(no_limit: None) -> None:
    torch = pytest.importorskip("torch")
    own = torch.cuda.mem_get_info
    module = module_with(GENERATOR, torch=torch)
    with carried_out(module, SHIM.id):
        assert torch.cuda.mem_get_info is own
        assert isinstance(torch.zeros(1), module.torch.Tensor)


@pytest.mark.parametrize(
    ("gpu", "npu", "asked"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_the_later_speculators_asks_its_own_helper(
    no_limit: None, gpu: bool, npu: bool, asked: bool
) -> None:
    helper = Recorder((5, 9))
    module = module_with(
        GENERATOR,
        torch=torch_with(gpu, Recorder()),
        mem_get_info=helper,
        is_npu_available=lambda: npu,
    )
    with carried_out(module, SHIM.id):
        answer = module.mem_get_info()
    assert (answer == (5, 9)) is asked
    assert bool(helper.calls) is asked
