"""unique-reply: the reply of one worker, bare or as a list of one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from probing import GENERATE_BY_HAND, GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import Status
from eagle3compat.shims.unique_reply import SHIM


def test_needed_where_the_reply_is_indexed(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert finding.conditional
    line = installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
    assert "captured_states_list[0]" in line


def test_not_needed_where_the_reply_is_taken_as_it_is(later: Builds) -> None:
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*GENERATE_BY_HAND),
        installed.without(GENERATOR),
        installed.without_text(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


class Executor:
    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((method, args, kwargs))
        return self.reply


@pytest.fixture
def module() -> ModuleType:
    return module_with(GENERATOR, MultiprocExecutor=Executor)


FIRST, SECOND = object(), object()
"""Two layers' states."""


@pytest.mark.parametrize("reply", [None, [FIRST, SECOND], [FIRST], []])
def test_a_bare_reply_is_listed(module: ModuleType, reply: Any) -> None:
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor(reply)
        assert executor.collective_rpc("_get_captured_states", unique_reply_rank=0) == [reply]
    assert "value itself" in settled.choices()[SHIM.id]


@pytest.mark.parametrize("reply", [[None], [[FIRST, SECOND]], [[FIRST]]])
def test_a_reply_that_is_listed_stays_as_it_is(module: ModuleType, reply: Any) -> None:
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor(reply)
        assert executor.collective_rpc("_get_captured_states", unique_reply_rank=0) is reply
    assert "list of one" in settled.choices()[SHIM.id]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("_get_captured_states", {}),
        ("_reset_capture", {"unique_reply_rank": 0}),
        ("get_kv_cache_spec", {"timeout": 5}),
    ],
)
def test_other_calls_are_passed_on_untouched(
    module: ModuleType, method: str, options: dict[str, Any]
) -> None:
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor([FIRST, SECOND])
        assert executor.collective_rpc(method, 1, **options) == [FIRST, SECOND]
    assert executor.calls == [(method, (1,), options)]
    assert settled.choices() == {}
