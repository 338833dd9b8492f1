"""Facts and shims make a plan: one decision a shim. Everything else asks the same plan."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from eagle3compat.errors import InputError, Refusal
from eagle3compat.installed import Build
from eagle3compat.shim import GENERATOR, Finding, Shim, Stage, Status, all_shims

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

Versions: TypeAlias = tuple[str | None, str | None, str | None]

DISABLE_VARIABLE = "EAGLE3COMPAT_DISABLE"
NATIVE_ROUTE = (
    "the in-process generator is gone from this speculators; it reads hidden states through vLLM's "
    "own extract_hidden_states and a KV connector, and nothing of ours is needed"
)


@dataclass(frozen=True)
class Decision:
    """What the plan says of one shim.

    Args:
        shim: the shim.
        finding: what its probe found, or why it is off.
        versions: of speculators, vLLM and transformers; None where one is not known.
    """

    shim: Shim
    finding: Finding
    versions: Versions

    @property
    def status(self) -> Status:
        return self.finding.status

    @cached_property
    def expected(self) -> bool | None:
        """What the version ranges lead to expect; None where they say nothing."""
        ranges = (self.shim.consumers, self.shim.expected, self.shim.transformers)
        inside = [
            _contains(specifier, version)
            for specifier, version in zip(ranges, self.versions, strict=True)
            if specifier is not None
        ]
        return None if None in inside else all(inside)

    @property
    def disagreement(self) -> str | None:
        """How the version ranges and the code differ; the code decides."""
        if self.expected is None or self.status not in (Status.NEEDED, Status.NOT_NEEDED):
            return None
        if self.expected == (self.status is Status.NEEDED):
            return None
        expected = "needed" if self.expected else "not needed"
        names = (("vLLM", self.shim.expected), ("transformers", self.shim.transformers))
        ranges = [f"{name} {specifier}" for name, specifier in names if specifier is not None]
        listed = ", ".join(ranges or [f"speculators {self.shim.consumers}"])
        return f"expected {expected} ({listed}), the code says otherwise"

    @property
    def call_site(self) -> str:
        """``file:line in function`` of the first contract."""
        contract = self.shim.contracts[0]
        file = contract.consumer.replace(".", "/") + ".py"
        line = "" if self.finding.line is None else f":{self.finding.line}"
        return f"{file}{line} in {contract.within}"


@dataclass(frozen=True)
class Plan:
    """One decision a shim of one stage, for one consumer build and one provider build.

    Args:
        consumer: the speculators build.
        provider: the vLLM build; for training, the transformers build.
        decisions: in the order in which shims are applied.
        route: "in-process", or "native" for a speculators without the generator.
        stage: what the shims serve.
    """

    consumer: Build
    provider: Build
    decisions: tuple[Decision, ...]
    route: str
    stage: Stage = Stage.EXTRACTION

    @cached_property
    def needed(self) -> tuple[Decision, ...]:
        return self._with(Status.NEEDED)

    @cached_property
    def drift(self) -> tuple[Decision, ...]:
        return self._with(Status.DRIFT)

    @cached_property
    def off(self) -> tuple[Decision, ...]:
        return self._with(Status.OFF)

    def decision(self, shim_id: str) -> Decision:
        """The decision on one shim; raises ``KeyError``."""
        return {decision.shim.id: decision for decision in self.decisions}[shim_id]

    def check(self) -> None:
        """Raise a ``Refusal`` when some contract cannot be judged: refuse or be right."""
        if not self.drift:
            return
        first, *others = self.drift
        more = f" ({len(others)} more: {', '.join(d.shim.id for d in others)})" if others else ""
        contract = first.shim.contracts[0]
        raise Refusal(
            first.call_site,
            f"{contract.needs} [{contract.provider}], or a shape that shim {first.shim.id} repairs",
            f"{first.finding.reason}{more}",
            f"speculators {self.consumer.version} ({self.consumer.package_dir}) on "
            f"{self.provider.distribution or self.provider.package} {self.provider.version} "
            f"({self.provider.package_dir}) is not known to work; run verify-patches for the whole "
            "list.",
        )

    def _with(self, status: Status) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.status is status)


def make_plan(
    facts: Facts,
    consumer: Build,
    provider: Build,
    disabled: Collection[str] = (),
    stage: Stage = Stage.EXTRACTION,
) -> Plan:
    """Decide for each shim of a stage, from source text alone.

    Args:
        facts: what the sources of both builds say.
        consumer: the speculators build.
        provider: the vLLM build; for training, the transformers build.
        disabled: ids of shims that the user turned off; "all" for every one.
        stage: whose shims are decided on.

    Raises:
        InputError: ``disabled`` names no shim.
    """
    shims = all_shims()
    unknown = set(disabled) - {"all"} - {record.id for record in shims}
    if unknown:
        known = ", ".join(record.id for record in shims)
        raise InputError(
            f"{DISABLE_VARIABLE}: {', '.join(sorted(unknown))} is no shim; there are {known}"
        )
    versions = (consumer.version, _version(facts, "vllm"), _version(facts, "transformers"))
    shims = tuple(record for record in shims if stage in record.stages)
    if facts.module(GENERATOR) is None:
        gone = Finding(Status.NOT_NEEDED, NATIVE_ROUTE)
        decisions = tuple(Decision(record, gone, versions) for record in shims)
        return Plan(consumer, provider, decisions, "native", stage)
    decisions = tuple(
        Decision(record, _finding(record, facts, disabled), versions) for record in shims
    )
    return Plan(consumer, provider, decisions, "in-process", stage)


def disabled_by_environment() -> tuple[str, ...]:
    """The ids of shims that ``EAGLE3COMPAT_DISABLE`` turns off, "all" included."""
    names = os.environ.get(DISABLE_VARIABLE, "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def _finding(record: Shim, facts: Facts, disabled: Collection[str]) -> Finding:
    if record.id in disabled or "all" in disabled:
        return Finding(Status.OFF, f"turned off ({DISABLE_VARIABLE})")
    return record.probe(facts)


def _version(facts: Facts, package: str) -> str | None:
    source = facts.sources.get(package)
    return None if source is None else source.build.version


def _contains(specifier: str, version: str | None) -> bool | None:
    """Whether a version lies in a range, by its release numbers: a nightly's suffix sorts low."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    if version is None:
        return None
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return None
    return SpecifierSet(specifier).contains(release, prereleases=True)
