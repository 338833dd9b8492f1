"""How shims ask facts: known texts by digest, and calls that bind after a repair."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade import GENERATOR, read

from eagle3compat.probes import all_of, call_binds, digest, function_text, known_function, line_of
from eagle3compat.shim import Finding, Status

TEXT = '''\
import torch


def first(value):
    """Says.

    More.
    """
    return value


class Holder:
    """Holds."""

    factor = 2

    def method(
        self,
        value,
    ):
        if value:

            return value
        return self.factor

    async def waits(self):
        def method():
            return 1

        return method


def method(value): return value


last = 1
'''


@pytest.mark.parametrize(
    ("qualname", "first", "last"),
    [
        ("first", "def first(value):", "    return value"),
        ("Holder", "class Holder:", "        return method"),
        ("Holder.method", "    def method(", "        return self.factor"),
        ("Holder.waits", "    async def waits(self):", "        return method"),
        ("method", "def method(value): return value", "def method(value): return value"),
    ],
)
def test_a_functions_text_is_all_of_it_and_no_more(qualname: str, first: str, last: str) -> None:
    lines = (function_text(TEXT, qualname) or "").splitlines()
    assert (lines[0], lines[-1]) == (first, last)


@pytest.mark.parametrize(
    "qualname",
    ["absent", "Holder.absent", "Holder.first", "first.method", "Holder.waits.absent", "last", ""],
)
def test_what_is_not_defined_has_no_text(qualname: str) -> None:
    assert function_text(TEXT, qualname) is None
    assert digest(TEXT, qualname) is None


def test_text_that_is_no_python_has_no_functions() -> None:
    assert function_text(f"{TEXT})", "first") is None


def test_of_several_definitions_all_count() -> None:
    text = "if fast:\n    def run(): return 1\nelse:\n    def run(): return 2\nclass run: ...\n"
    expected = "    def run(): return 1\n    def run(): return 2\nclass run: ..."
    assert function_text(text, "run") == expected


@pytest.mark.parametrize(
    "added",
    [
        "class Holder:\n    def method(self): ...\n",
        "try:\n    pass\nexcept Exception:\n    class Holder:\n        def method(self): ...\n",
    ],
)
def test_a_second_definition_by_hand_changes_the_digest(added: str) -> None:
    assert digest(TEXT + added, "Holder.method") != digest(TEXT, "Holder.method")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return self.factor", "return self.factor + 1"),
        ("        value,\n", "        value=None,\n"),
        ("    def method(\n", "    @torch.no_grad()\n    def method(\n"),
        ("        if value:\n\n", "        if value:\n            # a remark\n"),
        ("        if value:\n\n", "        if value:\n# a remark that is not indented\n"),
    ],
)
def test_any_edit_of_a_function_changes_its_digest(old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    assert digest(TEXT.replace(old, new), "Holder.method") != digest(TEXT, "Holder.method")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import torch\n", "import torch\nimport vllm\n"),
        ("factor = 2", "factor = 3"),
        ("return 1", "return 2"),
        ("        return self.factor\n", "        return self.factor   \n\n\n"),
    ],
)
def test_edits_elsewhere_and_trailing_blanks_do_not(old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    assert digest(TEXT.replace(old, new), "Holder.method") == digest(TEXT, "Holder.method")


def test_the_first_line_that_holds_a_fragment_is_pointed_at() -> None:
    assert line_of(TEXT, "return value") == 9
    assert line_of(TEXT, "nowhere") is None


CONSUMER = """\
from vllm.core import Scheduler


class Generator:
    def make(self):
        return Scheduler(1, policy="fcfs")
"""


def finding(tmp_path: Path, parameters: str, *, call: str = "1, policy='fcfs'") -> Finding:
    """What a probe of the call above says, that may drop ``policy`` and add ``size``."""
    consumer = CONSUMER.replace('1, policy="fcfs"', call)
    vllm = f"class Scheduler:\n    def __init__(self, {parameters}): ...\n"
    facts = read(tmp_path, {"vllm.core": vllm}, {GENERATOR: consumer})
    return call_binds(GENERATOR, "vllm.core.Scheduler", drop=("policy",), add=("size",))(facts)


@pytest.mark.parametrize(
    ("parameters", "status", "reason"),
    [
        ("count, policy", Status.NOT_NEEDED, "binds"),
        ("count, policy, size=1", Status.NOT_NEEDED, "binds"),
        ("count, **more", Status.NOT_NEEDED, "binds"),
        ("count", Status.NEEDED, "'policy'"),
        ("count, policy, size", Status.NEEDED, "'size'"),
        ("count, *, size", Status.NEEDED, "'policy'"),
        ("count, size, other", Status.DRIFT, "'other'"),
        ("policy", Status.DRIFT, "'policy'"),
        ("", Status.DRIFT, "positional"),
    ],
)
def test_a_call_needs_a_repair_where_only_the_repair_binds(
    tmp_path: Path, parameters: str, status: Status, reason: str
) -> None:
    found = finding(tmp_path, parameters)
    assert found.status is status
    assert reason in found.reason
    assert found.line == 6


def test_a_call_with_arguments_that_text_cannot_show_is_drift(tmp_path: Path) -> None:
    assert finding(tmp_path, "count, policy", call="**options").status is Status.DRIFT


def test_a_call_that_the_consumer_does_not_make_needs_nothing(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.core": "def other(): ...\n"}, {GENERATOR: CONSUMER})
    found = call_binds(GENERATOR, "vllm.core.other")(facts)
    assert found.status is Status.NOT_NEEDED


def test_a_callee_that_is_gone_is_drift(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.core": "other = 1\n"}, {GENERATOR: CONSUMER})
    found = call_binds(GENERATOR, "vllm.core.Scheduler")(facts)
    assert (found.status, found.line) == (Status.DRIFT, 6)


KNOWN = Finding(Status.NOT_NEEDED, "known")


def test_a_known_function_is_answered_from_the_table_with_a_line(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.core": ""}, {GENERATOR: CONSUMER})
    text = digest(CONSUMER, "Generator.make")
    assert text is not None
    found = known_function(GENERATOR, "Generator.make", {text: KNOWN}, "Scheduler(1")(facts)
    assert found == Finding(Status.NOT_NEEDED, "known", None, 6)


@pytest.mark.parametrize("qualname", ["Generator.make", "Generator.gone"])
def test_an_unknown_or_absent_function_is_drift(tmp_path: Path, qualname: str) -> None:
    facts = read(tmp_path, {"vllm.core": ""}, {GENERATOR: CONSUMER})
    found = known_function(GENERATOR, qualname, {"0123456789abcdef": KNOWN}, "make")(facts)
    assert found.status is Status.DRIFT
    assert qualname in found.reason


@pytest.mark.parametrize("drifting", [0, 1, 2])
def test_of_several_probes_one_that_cannot_tell_decides(tmp_path: Path, drifting: int) -> None:
    facts = read(tmp_path, {"vllm.core": ""})
    findings = [Finding(Status.NEEDED, str(number)) for number in range(3)]
    findings[drifting] = Finding(Status.DRIFT, "cannot tell")
    probe = all_of(*[lambda _, found=found: found for found in findings])
    assert probe(facts).reason == "cannot tell"


def test_of_several_probes_that_can_tell_the_first_decides(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.core": ""})
    probe = all_of(lambda _: KNOWN, lambda _: Finding(Status.NEEDED, "second"))
    assert probe(facts) is KNOWN
