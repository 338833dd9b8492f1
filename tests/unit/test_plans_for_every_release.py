"""Every plan for every vLLM release, from the committed facts; and all that must agree with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from recorded_facts import SPECULATORS, parse_signature, read_records, recorded_plan

from eagle3compat import plan as planning
from eagle3compat.errors import InputError
from eagle3compat.matrix import Cell, read_matrix
from eagle3compat.plan import Plan
from eagle3compat.shim import Stage, Status, all_shims, shim
from eagle3compat.sources import Source, open_source

RECORDS = {record["vllm"]: record for record in read_records()}
MINORS = [f"0.{minor}" for minor in range(12, 33)]
CELLS = [cell for cell in read_matrix().cells if cell.applied == "all"]
BY_TRANSFORMERS = {
    record.id: record.transformers
    for record in all_shims()
    if record.transformers and Stage.EXTRACTION in record.stages
}

every_release = pytest.mark.parametrize("vllm", RECORDS)
both_consumers = pytest.mark.parametrize("speculators", SPECULATORS)


@cache
def consumer(version: str) -> Source:
    try:
        return open_source(f"speculators=={version}", "speculators")
    except InputError as error:
        pytest.skip(f"needs the text of speculators {version}: {error}")


def plan_of(speculators: str, vllm: str) -> Plan:
    return recorded_plan(consumer(speculators), RECORDS[vllm])


def test_every_minor_release_is_recorded() -> None:
    assert {f"0.{Version(version).minor}" for version in RECORDS} >= set(MINORS)


@pytest.mark.network
@both_consumers
@every_release
def test_every_contract_is_judged_and_ranges_and_code_agree(speculators: str, vllm: str) -> None:
    made = plan_of(speculators, vllm)
    assert made.route == "in-process"
    assert not made.drift, [(each.shim.id, each.finding.reason) for each in made.drift]
    assert not [(each.shim.id, each.disagreement) for each in made.decisions if each.disagreement]


@pytest.mark.network
def test_a_range_that_is_one_release_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    late = replace(shim("request-eos"), expected=">=0.17.1")
    shims = tuple(late if each.id == late.id else each for each in all_shims())
    monkeypatch.setattr(planning, "all_shims", lambda: shims)
    told = plan_of("0.3.0", "0.17.0").decision("request-eos")
    assert told.status is Status.NEEDED
    assert ">=0.17.1" in (told.disagreement or "")
    assert plan_of("0.3.0", "0.17.1").decision("request-eos").disagreement is None


@pytest.mark.network
def test_every_range_has_both_its_ends_in_the_facts() -> None:
    """A shim that no recorded pair needs, or whose bound lies beyond them, was not looked at."""
    for record in all_shims():
        if record.transformers is None and Stage.EXTRACTION in record.stages:
            statuses = {
                plan_of(speculators, vllm).decision(record.id).status
                for speculators in SPECULATORS
                for vllm in (
                    min(RECORDS, key=Version),
                    "0.24.0",
                    "0.27.1",
                    max(RECORDS, key=Version),
                )
            }
            assert Status.NEEDED in statuses, record.id


@pytest.mark.network
@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda cell: f"{cell.speculators}-{cell.vllm}-{cell.model}-{cell.runner}"
)
def test_each_cell_ran_the_shims_that_the_plan_names(cell: Cell) -> None:
    if cell.vllm not in RECORDS or cell.result == "cannot install":
        pytest.skip("a nightly, or no run")
    planned = {each.shim.id for each in plan_of(cell.speculators, cell.vllm).needed}
    for shim_id, range_ in BY_TRANSFORMERS.items():
        if SpecifierSet(range_).contains(cell.transformers or "0"):
            planned.add(shim_id)
    assert set(cell.shims) == planned


def test_every_cell_is_right_or_refused_and_refusals_give_their_reason() -> None:
    assert [cell.words for cell in CELLS if cell.result not in ("right", "refused")] == []
    assert all(cell.detail for cell in CELLS if cell.result != "right")
    assert all((cell.worst or 1.0) <= 1e-4 for cell in CELLS if cell.result == "right")


@pytest.mark.network
@pytest.mark.parametrize(
    ("kind", "key", "answer", "shim_id"),
    [
        ("signatures", "vllm.v1.request.Request", "(request_id, prompt)", "request-eos"),
        ("signatures", "vllm.v1.core.sched.scheduler.Scheduler", None, "backend-block-size"),
        ("lines", "vllm.platforms.interface", [], "backend-block-size"),
        ("signatures", "vllm.v1.attention.backends.utils.resolve_kv_cache_layout", "(config)",
         "kv-cache-layout"),
    ],
)  # fmt: skip
def test_a_release_of_another_shape_is_drift(
    kind: str, key: str, answer: Any, shim_id: str
) -> None:
    changed = {**RECORDS["0.32.0"], kind: {**RECORDS["0.32.0"][kind], key: answer}}
    made = recorded_plan(consumer("0.4.0.1"), changed)
    assert shim_id in [each.shim.id for each in made.drift]


@pytest.mark.parametrize(
    "text", ["(a, /, b=…, *, c, **rest)", "(self, *args, key=…)", "async (a)", "()"]
)
def test_signatures_are_read_back_as_they_were_written(text: str) -> None:
    assert str(parse_signature(text)) == text
