"""A fork in which CUDA does not work is found out by forking, and workers are then spawned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eagle3compat import handshake, settled
from eagle3compat.errors import Refusal
from eagle3compat.patching import Ledger, Patcher
from eagle3compat.shim import GENERATOR
from eagle3compat.worker_start import METHOD, NOTE, install, lost_in_fork


def torch_that_answers(answer: Callable[[], bool]) -> Any:
    """A torch that says in a fork whether that is a bad one."""
    return SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=answer))


@pytest.fixture
def notes() -> Iterator[None]:
    settled.forget()
    yield
    settled.forget()


def started_by(executor: type, *, bad_fork: bool) -> Any:
    """An executor as the patched consumer makes it."""
    module = ModuleType(GENERATOR)
    vars(module).update(MultiprocExecutor=executor, torch=torch_that_answers(lambda: bad_fork))
    ledger = Ledger()
    install(module, Patcher(ledger, module, handshake.ID))
    try:
        return module.MultiprocExecutor(vllm_config="config")
    finally:
        assert ledger.undo() == ()
        assert module.MultiprocExecutor is executor


class Executor:
    def __init__(self, vllm_config: str) -> None:
        self.seen = (vllm_config, os.environ.get(METHOD))


def set_method(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(METHOD, raising=False)
    if value is not None:
        monkeypatch.setenv(METHOD, value)


def test_the_question_is_asked_in_a_fork_of_this_process() -> None:
    here = os.getpid()
    assert lost_in_fork(torch_that_answers(lambda: os.getppid() == here))
    assert not lost_in_fork(torch_that_answers(lambda: os.getpid() == here))


def test_a_torch_that_cannot_tell_counts_as_lost() -> None:
    def fail() -> bool:
        raise AttributeError

    assert lost_in_fork(torch_that_answers(fail))
    assert lost_in_fork(ModuleType("torch"))


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("before", [None, "fork"])
def test_workers_are_spawned_where_a_fork_would_be_bad(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    set_method(monkeypatch, before)
    assert started_by(Executor, bad_fork=True).seen == ("config", "spawn")
    assert os.environ.get(METHOD) == before
    assert "spawned" in settled.choices()[NOTE]


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize(
    ("before", "bad_fork"), [(None, False), ("fork", False), ("spawn", False), ("spawn", True)]
)
def test_what_works_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, before: str | None, bad_fork: bool
) -> None:
    set_method(monkeypatch, before)
    assert started_by(Executor, bad_fork=bad_fork).seen == ("config", before)
    assert settled.choices() == {}


@pytest.mark.usefixtures("notes")
def test_a_start_that_fails_puts_the_variable_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingExecutor:
        def __init__(self, vllm_config: str) -> None:
            raise ConnectionError

    set_method(monkeypatch, None)
    with pytest.raises(ConnectionError):
        started_by(FailingExecutor, bad_fork=True)
    assert METHOD not in os.environ


def test_it_comes_with_every_plan() -> None:
    assert any(patch.install is install for patch in handshake.PATCHES)


@pytest.mark.parametrize(("method", "bad_fork"), [("spawn", False), (None, True)])
def test_spawned_workers_without_our_entry_point_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, notes: None, method: str | None, bad_fork: bool
) -> None:
    set_method(monkeypatch, method)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    with pytest.raises(Refusal, match="Install eagle3compat into this environment"):
        started_by(Executor, bad_fork=bad_fork)


def test_forked_workers_need_no_entry_point(monkeypatch: pytest.MonkeyPatch, notes: None) -> None:
    set_method(monkeypatch, None)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    assert started_by(Executor, bad_fork=False).seen == ("config", None)
