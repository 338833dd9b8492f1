"""Judging a pair of builds: the plan's contracts, every other demand, and what was edited by hand.

The contracts and their decisions are the plan's own; nothing is decided a second time here. The
other demands are judged call by call, and a break that the plan says a shim repairs is shown once,
as repaired.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3compat.demands import Demands, consumer_modules, passes_of
from eagle3compat.errors import BuildNotFoundError, InputError
from eagle3compat.facts import Facts
from eagle3compat.intact import edited_modules
from eagle3compat.records import Signature
from eagle3compat.report import Check, EditedFile, Report, Unresolved, Verdict
from eagle3compat.sources import Source, open_source

if TYPE_CHECKING:
    from eagle3compat.cache import FactsCache
    from eagle3compat.plan import Decision, Plan
    from eagle3compat.shim import Contract

Spec = str | Path | None
LEVELS = ("static", "live", "smoke")
__all__ = ["LEVELS", "Report", "judge", "verify"]


def verify(
    vllm: Spec = None,
    speculators: Spec = None,
    transformers: Spec = None,
    level: str = "static",
    cache: FactsCache | None = None,
) -> Report:
    """Judge every call between speculators and vLLM, importing neither at the static level.

    Args:
        vllm: None for the installed build; or a version requirement, a wheel, an sdist, a folder.
        speculators: likewise.
        transformers: likewise; where none is installed its calls are not judged.
        level: ``static``, ``live`` (also the live objects, in processes of their own) or
            ``smoke`` (also the real engine on a tiny Kimi).
        cache: where facts are kept between runs; the user's cache folder by default.

    Raises:
        InputError: a build cannot be found, fetched or read, or the level is unknown.
    """
    if level not in LEVELS:
        raise InputError(f"level {level}: one of {', '.join(LEVELS)} is wanted.")
    consumer = open_source(speculators, "speculators")
    provider = open_source(vllm, "vllm")
    if level != "static" and (vllm is not None or speculators is not None):
        raise InputError(
            f"level {level} runs what is installed: leave out --vllm and --speculators."
        )
    others = tuple(_optional_sources(transformers))
    facts = Facts(consumer, provider, *others, cache=cache)
    with _collection_paused():
        report = judge(facts)
        facts.save()
    if level == "static":
        return report
    from eagle3compat.live import check_live

    return with_checks(report, check_live(facts, report, smoke=level == "smoke"), level)


def judge(facts: Facts) -> Report:
    """Judge the pair of builds whose sources the facts hold, from text alone."""
    from eagle3compat.plan import disabled_by_environment, make_plan

    consumer, provider = facts.sources["speculators"].build, facts.sources["vllm"].build
    plan = make_plan(facts, consumer, provider)
    decisions = [*plan.decisions, *_of_training_alone(facts)]
    off = disabled_by_environment()
    contracts = [each for decision in decisions for each in _contract(facts, decision, off)]
    demands = Demands(facts)
    found = list(demands.judge(consumer_modules(facts)))
    checks = [*contracts, *_without_contracts(found, contracts, plan)]
    others = tuple(
        source.build
        for package, source in facts.sources.items()
        if package not in ("vllm", "speculators")
    )
    return Report(
        consumer,
        provider,
        others,
        "static",
        plan.route,
        tuple(sorted(checks, key=lambda each: each.severity)),
        tuple(_distinct(demands.unresolved)),
        tuple(_edited(facts, decisions)),
        tuple(_notes(facts, plan)),
    )


def _of_training_alone(facts: Facts) -> Iterator[Decision]:
    """What is decided on shims of training that extraction does not share."""
    from eagle3compat.plan import make_plan
    from eagle3compat.shim import Stage

    if "transformers" not in facts.sources:
        return
    consumer, provider = (
        facts.sources[package].build for package in ("speculators", "transformers")
    )
    for decision in make_plan(facts, consumer, provider, stage=Stage.TRAINING).decisions:
        if Stage.EXTRACTION not in decision.shim.stages:
            yield decision


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Syntax trees are many small objects and no garbage: collecting costs a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def with_checks(report: Report, checks: Iterable[Check], level: str) -> Report:
    """The report of a further level: what was found there besides."""
    merged = sorted([*checks, *report.checks], key=lambda each: each.severity)
    return replace(report, checks=tuple(merged), level=level)


def _optional_sources(transformers: Spec) -> Iterator[Source]:
    if transformers is not None:
        yield open_source(transformers, "transformers")
    for package in ("transformers", "torch"):
        if package == "transformers" and transformers is not None:
            continue
        try:
            yield open_source(None, package)
        except BuildNotFoundError:
            continue  # Its calls are then counted as unresolved, and a note says so.


def _contract(facts: Facts, decision: Decision, off: Iterable[str]) -> Iterator[Check]:
    from eagle3compat.shim import Status

    record = decision.shim
    is_off = record.id in off or "all" in off
    verdict = {
        Status.NEEDED: Verdict.BROKEN if is_off else Verdict.REPAIRED,
        Status.NOT_NEEDED: Verdict.HOLDS,
    }.get(decision.status, Verdict.CANNOT_TELL)
    reason = decision.finding.reason
    if decision.finding.conditional:
        reason = f"{reason} (depends on {decision.finding.conditional})"
    for contract in record.contracts:
        if facts.module(contract.consumer) is None:
            continue
        passes, takes = _passes_and_takes(facts, contract)
        yield Check(
            "contract",
            verdict,
            _call_site(facts, contract, decision),
            contract.within,
            contract.provider,
            facts.place(contract.provider) if _is_in_text(contract.provider) else None,
            passes,
            takes,
            decision.disagreement or _expectation(decision),
            reason,
            record.id,
            _remedy(decision, verdict, is_off),
        )


def _call_site(facts: Facts, contract: Contract, decision: Decision) -> str:
    place = facts.location(contract.consumer)
    if decision.finding.line is not None and contract is decision.shim.contracts[0]:
        return f"{place}:{decision.finding.line}"
    calls = facts.calls(contract.consumer, contract.provider)
    return f"{place}:{calls[0].line}" if calls else place


def _passes_and_takes(facts: Facts, contract: Contract) -> tuple[str, str]:
    calls = facts.calls(contract.consumer, contract.provider)
    passes = passes_of(calls[0]) if calls else ""
    if not _is_in_text(contract.provider):
        return passes, ""
    signature = facts.look_up_signature(contract.provider)
    return passes, str(signature) if isinstance(signature, Signature) else ""


def _is_in_text(symbol: str) -> bool:
    """Whether reading would tell: torch's public functions are C, or wrap what is."""
    return symbol.partition(".")[0] in ("vllm", "transformers")


def _expectation(decision: Decision) -> str:
    if decision.expected is None:
        return "no expectation: the version is unknown"
    return f"as expected ({'needed' if decision.expected else 'not needed'})"


def _remedy(decision: Decision, verdict: Verdict, is_off: bool) -> str:
    if verdict is Verdict.BROKEN and is_off:
        return f"Shim {decision.shim.id} repairs it and is turned off."
    if verdict is Verdict.CANNOT_TELL:
        from eagle3compat.shim import Stage

        refuses = "apply()" if Stage.EXTRACTION in decision.shim.stages else "The trainer"
        return (
            f"{refuses} refuses. Reinstall edited files, use a build of the matrix, or report it "
            "(eagle3compat bug-report)."
        )
    return (
        f"apply() repairs it with shim {decision.shim.id}." if verdict is Verdict.REPAIRED else ""
    )


def _without_contracts(found: list[Check], contracts: list[Check], plan: Plan) -> Iterator[Check]:
    """The demands that no contract's row shows already."""
    del plan
    for check in found:
        covering = [each for each in contracts if _covers(each, check)]
        if not covering:
            yield check


def _covers(contract: Check, check: Check) -> bool:
    """Whether a contract's row speaks of the very break, or of the very call that holds."""
    same_place = contract.within == check.within and contract.call_site == check.call_site
    same_symbol = contract.symbol == check.symbol
    if not (same_place and same_symbol):
        return False
    return check.verdict is Verdict.HOLDS or check.reason in contract.reason


def _distinct(unresolved: Iterable[Unresolved]) -> Iterator[Unresolved]:
    yield from dict.fromkeys(unresolved)


def _edited(facts: Facts, decisions: Iterable[Decision]) -> Iterator[EditedFile]:
    from eagle3compat.shim import Status

    touched: dict[str, list[Decision]] = {}
    for decision in decisions:
        names = {*decision.shim.modules, *(each.consumer for each in decision.shim.contracts)}
        names |= {_module_of(facts, each.provider) for each in decision.shim.contracts}
        for name in names:
            touched.setdefault(name, []).append(decision)
    for package in ("speculators", "vllm"):
        build = facts.sources[package].build
        modules = [name for name in touched if name.partition(".")[0] == package]
        if package == "speculators":
            modules = list(dict.fromkeys([*modules, *consumer_modules(facts)]))
        for module, path in edited_modules(build, modules).items():
            decisions = touched.get(module, [])
            yield EditedFile(
                path,
                module,
                tuple(each.shim.id for each in decisions),
                tuple(
                    each.shim.id
                    for each in decisions
                    if each.expected and each.status is Status.NOT_NEEDED
                ),
            )


def _module_of(facts: Facts, dotted: str) -> str:
    while dotted and facts.module(dotted) is None:
        dotted = dotted.rpartition(".")[0]
    return dotted


def _notes(facts: Facts, plan: Plan) -> Iterator[str]:
    if plan.route == "native":
        from eagle3compat.plan import NATIVE_ROUTE

        yield NATIVE_ROUTE
    for package in ("transformers", "torch"):
        if package not in facts.sources:
            yield f"{package} is not installed here: what is used of it is not judged."
    yield from _requirements_not_met(facts)


def _requirements_not_met(facts: Facts) -> Iterator[str]:
    """What the builds' own metadata asks of each other, where those judged do not meet it."""
    from eagle3compat.requirements import unmet

    for package in ("vllm", "speculators"):
        source = facts.sources[package]
        builds = [each.build for each in facts.sources.values()]
        for requirement, build in unmet(source.metadata(), builds):
            yield f"{source.build.title} asks for {requirement}, and is judged with {build.title}"
