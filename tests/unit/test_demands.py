"""A break is found and named without any shim that knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade import read

from eagle3compat.demands import Demands, consumer_modules
from eagle3compat.report import Check, Verdict

CONSUMER = """
from vllm.config import SchedulerConfig
from vllm.core import Request, RequestStatus, Scheduler, get_groups


class Generator:
    def __init__(self, config):
        self.scheduler = Scheduler(config, log=False)
        groups = get_groups(config, memory=1)
        self.blocks = groups.num_blocks
        SchedulerConfig(max_num_seqs=32)

    def run(self, ids):
        self.scheduler.add_request(Request("a", ids))
        output = self.scheduler.schedule()
        self.scheduler.finish(list(ids), RequestStatus.ABORTED)
        return output.total
"""
CORE = """
import enum
class RequestStatus(enum.IntEnum):
    ABORTED = 1
class Groups:
    num_blocks: int
class Output:
    total: int
class Request:
    def __init__(self, request_id, prompt, priority=0): ...
class Scheduler:
    def __init__(self, config, log=True): ...
    def add_request(self, request): ...
    def schedule(self) -> Output: ...
    def finish(self, ids, status): ...
def get_groups(config, memory) -> Groups: ...
"""
CONFIG = """
from dataclasses import dataclass
@dataclass
class SchedulerConfig:
    max_num_seqs: int = 1
"""
MODULE = "speculators.data_generation.generator"


def judge(tmp_path: Path, core: str = CORE, config: str = CONFIG, **more: str) -> list[Check]:
    vllm = {"vllm.core": core, "vllm.config": config}
    vllm |= {f"vllm.{name}": text for name, text in more.items()}
    facts = read(tmp_path, vllm, {MODULE: CONSUMER})
    return list(Demands(facts).judge(consumer_modules(facts)))


def problems(checks: list[Check]) -> list[tuple[str, int, str, str]]:
    return [
        (each.verdict.value, int(each.call_site.rpartition(":")[2]), each.symbol, each.reason)
        for each in checks
        if each.verdict is not Verdict.HOLDS
    ]


def test_what_fits_holds_with_both_places_named(tmp_path: Path) -> None:
    checks = judge(tmp_path)
    assert problems(checks) == []
    (made,) = [
        each for each in checks if each.symbol == "vllm.core.Request" and each.kind == "call"
    ]
    assert made.call_site.endswith("data_generation/generator.py:14")
    assert made.within == "Generator.run"
    assert made.defined_at is not None
    assert made.defined_at.endswith("vllm/core.py:9")
    assert made.passes == "(…, …)"
    assert made.takes == "(request_id, prompt, priority=…)"


MUTATIONS = {
    "parameter renamed": (
        ("memory) ->", "available_memory) ->"),
        9,
        "vllm.core.get_groups",
        "unexpected keyword argument 'memory'; missing required argument 'available_memory'",
    ),
    "parameter removed": (
        ("config, log=True", "config"),
        8,
        "vllm.core.Scheduler",
        "unexpected keyword argument 'log'",
    ),
    "parameter made required": (
        ("priority=0", "priority"),
        14,
        "vllm.core.Request",
        "missing required argument 'priority'",
    ),
    "parameter made keyword-only": (
        ("request_id, prompt", "request_id, *, prompt"),
        14,
        "vllm.core.Request",
        "takes 1 positional arguments but 2 are given; missing required argument 'prompt'",
    ),
    "parameter made positional-only": (
        ("config, memory)", "config, memory, /)"),
        9,
        "vllm.core.get_groups",
        "positional-only argument 'memory' given by keyword; missing required argument 'memory'",
    ),
    "function made async": (
        ("def add_request", "async def add_request"),
        14,
        "vllm.core.Scheduler.add_request",
        "is a coroutine function here, and is not awaited",
    ),
    "method gone": (
        ("def finish", "def finish_requests"),
        16,
        "vllm.core.Scheduler.finish",
        "class vllm.core.Scheduler has no finish",
    ),
    "member of an enum gone": (
        ("ABORTED = 1", "STOPPED = 1"),
        16,
        "vllm.core.RequestStatus.ABORTED",
        "class vllm.core.RequestStatus has no ABORTED",
    ),
    "attribute of a result gone": (
        ("total: int", "sum: int"),
        17,
        "vllm.core.Scheduler.schedule().total",
        "class vllm.core.Output has no total",
    ),
    "attribute of a function's result gone": (
        ("num_blocks: int", "blocks: int"),
        10,
        "vllm.core.get_groups().num_blocks",
        "class vllm.core.Groups has no num_blocks",
    ),
}


@pytest.mark.parametrize(
    ("change", "line", "symbol", "reason"), MUTATIONS.values(), ids=MUTATIONS.keys()
)
def test_a_change_is_found_and_named(
    change: tuple[str, str], line: int, symbol: str, reason: str, tmp_path: Path
) -> None:
    assert change[0] in CORE
    found = problems(judge(tmp_path, CORE.replace(*change)))
    assert found == [("broken", line, symbol, reason)]


def test_a_required_field_of_a_config_is_found(tmp_path: Path) -> None:
    config = CONFIG.replace("    max_num_seqs", "    is_encoder_decoder: bool\n    max_num_seqs")
    found = problems(judge(tmp_path, config=config))
    assert found == [
        (
            "broken",
            11,
            "vllm.config.SchedulerConfig",
            "missing required argument 'is_encoder_decoder'",
        )
    ]


def test_a_moved_symbol_is_found_where_it_is_now(tmp_path: Path) -> None:
    core = CORE.replace("def get_groups", "def other_groups")
    found = problems(judge(tmp_path, core, moved="def get_groups(config, memory): ..."))
    assert found == [
        (
            "broken",
            3,
            "vllm.core.get_groups",
            "module vllm.core has no get_groups; it is in vllm.moved",
        )
    ]


def test_a_symbol_that_moved_and_is_reexported_still_holds(tmp_path: Path) -> None:
    core = CORE.replace(
        "def get_groups(config, memory) -> Groups: ...", "from vllm.moved import get_groups"
    )
    moved = "class Groups:\n    num_blocks: int\ndef get_groups(config, memory) -> Groups: ..."
    assert problems(judge(tmp_path, core, moved=moved)) == []


def test_a_module_that_is_gone_is_named_once_for_each_import(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.config": CONFIG}, {MODULE: CONSUMER})
    found = problems(list(Demands(facts).judge([MODULE])))
    assert {line for _, line, _, _ in found} == {3}
    assert {reason for *_, reason in found} == {"there is no module vllm.core"}


def test_a_provider_that_cannot_be_parsed_cannot_be_judged(tmp_path: Path) -> None:
    found = problems(judge(tmp_path, CORE + "\ndef broken(:\n"))
    assert found
    assert {verdict for verdict, *_ in found} == {"cannot tell"}
    assert all("cannot parse" in reason for *_, reason in found)


def test_definitions_that_differ_by_platform_cannot_be_judged(tmp_path: Path) -> None:
    core = CORE.replace(
        "def get_groups(config, memory) -> Groups: ...",
        "if platform():\n    def get_groups(config): ...\nelse:\n    def get_groups(x): ...",
    )
    found = problems(judge(tmp_path, core))
    assert [(verdict, symbol) for verdict, _, symbol, _ in found] == [
        ("cannot tell", "vllm.core.get_groups")
    ]


def test_guarded_demands_are_not_breaks(tmp_path: Path) -> None:
    consumer = """
try:
    from vllm.gone import thing
except ImportError:
    thing = None
from vllm.core import Scheduler
if newer():
    from vllm.gone import other
def run(scheduler: Scheduler):
    if hasattr(scheduler, "optional"):
        return scheduler.optional
"""
    facts = read(tmp_path, {"vllm.core": CORE}, {MODULE: consumer})
    demands = Demands(facts)
    assert problems(list(demands.judge([MODULE]))) == []
    assert [each.symbol for each in demands.unresolved] == ["vllm.gone.thing", "vllm.gone.other"]


def test_what_cannot_be_followed_is_listed_and_not_called_fine(tmp_path: Path) -> None:
    consumer = "from vllm.core import make, Scheduler\nmake().run(1)\nScheduler(**options())\n"
    facts = read(tmp_path, {"vllm.core": CORE + "\ndef make(): ..."}, {MODULE: consumer})
    demands = Demands(facts)
    checks = list(demands.judge([MODULE]))
    assert [each.symbol for each in demands.unresolved] == [
        "vllm.core.make().run",
        "vllm.core.Scheduler",
    ]
    assert not [each for each in checks if "run" in each.symbol]
    assert not [each for each in checks if each.kind == "call" and "Scheduler" in each.symbol]


def test_a_class_that_became_abstract_is_found(tmp_path: Path) -> None:
    base = """
from abc import ABC, abstractmethod
class Base(ABC):
    @abstractmethod
    def step(self): ...
"""
    consumer = "from vllm.core import Engine\nEngine()\n"
    for body, expected in (("def step(self): ...", 0), ("pass", 1)):
        core = f"{base}class Engine(Base):\n    {body}\n"
        facts = read(tmp_path, {"vllm.core": core}, {MODULE: consumer})
        found = problems(list(Demands(facts).judge([MODULE])))
        assert len(found) == expected
    assert found == [("broken", 2, "vllm.core.Engine", "is abstract: it does not define step")]
