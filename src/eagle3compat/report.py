"""What ``verify-patches`` found, as objects, as JSON and with its exit status.

The JSON is one object. ``schema_version`` is raised when a key changes its meaning or goes; keys
may be added without. ``reports`` holds one object for each pair of builds:

- ``consumer``, ``provider`` and ``others``: builds, each with package, distribution, version,
  commit, path and kind (null where unknown);
- ``level``, ``route``, ``verdict`` (the worst of the checks) and ``exit_status`` (0 or 1);
- ``counts``: number of checks by verdict, and of ``unresolved`` demands;
- ``checks``: objects with ``kind`` (contract, import, call, attribute, live, smoke), ``verdict``
  (holds, repaired, broken, cannot tell), ``call_site``, ``within``, ``symbol``, ``defined_at``,
  ``passes``, ``takes``, ``expected``, ``reason``, ``shim`` and ``remedy``;
- ``unresolved``: objects with ``call_site``, ``symbol`` and ``reason``: demands that the text does
  not let anybody follow, neither checked nor called fine;
- ``edited``: objects with ``path``, ``module``, ``shims`` and ``stands_in_for``: files that differ
  from their wheel's RECORD;
- ``notes``: remarks on the builds, in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from eagle3compat.installed import Build

SCHEMA_VERSION = 1


class Verdict(str, Enum):
    """What is said of one demand, worst first."""

    BROKEN = "broken"
    CANNOT_TELL = "cannot tell"
    REPAIRED = "repaired"
    HOLDS = "holds"


_SEVERITY = {verdict: order for order, verdict in enumerate(Verdict)}


@dataclass(frozen=True)
class Check:
    """One demand of the consumer, judged.

    Args:
        kind: ``contract``, ``import``, ``call``, ``attribute``, ``live`` or ``smoke``.
        verdict: the decision.
        call_site: ``path:line`` in the consumer.
        within: qualified name of the consumer's function.
        symbol: dotted name of what the provider must have.
        defined_at: ``path:line`` in the provider, where it is there.
        passes: what the call passes.
        takes: what the provider takes.
        expected: what the version's range led to expect, where a range speaks of it.
        reason: why the verdict is what it is.
        shim: the shim concerned.
        remedy: what to do next; empty where nothing is to be done.
    """

    kind: str
    verdict: Verdict
    call_site: str
    within: str
    symbol: str
    defined_at: str | None = None
    passes: str = ""
    takes: str = ""
    expected: str = ""
    reason: str = ""
    shim: str | None = None
    remedy: str = ""

    @property
    def severity(self) -> int:
        """0 for the worst."""
        return _SEVERITY[self.verdict]


@dataclass(frozen=True)
class Unresolved:
    """A demand that the text does not let anybody follow."""

    call_site: str
    symbol: str
    reason: str


@dataclass(frozen=True)
class EditedFile:
    """An installed file that is not what its wheel installed.

    Args:
        path: the file.
        module: its dotted name.
        shims: ids of the shims that concern this module.
        stands_in_for: ids of those that the version would need and the edited text does not.
    """

    path: str
    module: str
    shims: tuple[str, ...]
    stands_in_for: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything found for one pair of builds; ``checks`` are sorted, problems first."""

    consumer: Build
    provider: Build
    others: tuple[Build, ...]
    level: str
    route: str
    checks: tuple[Check, ...]
    unresolved: tuple[Unresolved, ...]
    edited: tuple[EditedFile, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks."""
        return min((each.verdict for each in self.checks), key=_SEVERITY.get, default=Verdict.HOLDS)  # type: ignore[arg-type]

    @property
    def exit_status(self) -> int:
        """0 where everything holds or is repaired, 1 where something is broken or in doubt."""
        return int(self.verdict in (Verdict.BROKEN, Verdict.CANNOT_TELL))

    @property
    def problems(self) -> tuple[Check, ...]:
        """The checks that are broken or cannot be judged."""
        return tuple(
            each for each in self.checks if each.verdict in (Verdict.BROKEN, Verdict.CANNOT_TELL)
        )

    def count(self, verdict: Verdict) -> int:
        """The number of checks with a verdict."""
        return sum(each.verdict is verdict for each in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as the JSON has it."""
        return {
            "consumer": _build(self.consumer),
            "provider": _build(self.provider),
            "others": [_build(each) for each in self.others],
            "level": self.level,
            "route": self.route,
            "verdict": self.verdict.value,
            "exit_status": self.exit_status,
            "counts": {each.value: self.count(each) for each in Verdict}
            | {"unresolved": len(self.unresolved)},
            "checks": [_plain(each) for each in self.checks],
            "unresolved": [_plain(each) for each in self.unresolved],
            "edited": [_plain(each) for each in self.edited],
            "notes": list(self.notes),
        }


def reports_to_dict(reports: tuple[Report, ...]) -> dict[str, Any]:
    """The whole JSON document."""
    import platform

    import eagle3compat

    return {
        "schema_version": SCHEMA_VERSION,
        "eagle3compat": eagle3compat.__version__,
        "python": platform.python_version(),
        "exit_status": max((each.exit_status for each in reports), default=0),
        "reports": [each.to_dict() for each in reports],
    }


def _build(build: Build) -> dict[str, Any]:
    return {
        "package": build.package,
        "distribution": build.distribution,
        "version": build.version,
        "commit": build.commit,
        "path": str(build.package_dir),
        "kind": build.kind,
    }


def _plain(record: Check | Unresolved | EditedFile) -> dict[str, Any]:
    return {
        name: value.value if isinstance(value, Verdict) else value
        for name, value in vars(record).items()
    }
