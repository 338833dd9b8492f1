"""How shims ask facts: does a call bind, and is a function of the consumer one that we know?"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from eagle3compat.shim import Finding, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Call, Facts

Probe = Callable[["Facts"], Finding]
_Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def call_binds(
    module: str, target: str, *, drop: tuple[str, ...] = (), add: tuple[str, ...] = ()
) -> Probe:
    """A probe: needed when the consumer's call does not bind, but does with the repair.

    Args:
        module: the consumer's module.
        target: dotted name of the provider's callable.
        drop: keywords that the repair may leave out.
        add: keywords that the repair may add.
    """

    def probe(facts: Facts) -> Finding:
        from eagle3compat.facts import Verdict, bind

        calls = facts.calls(module, target)
        if not calls:
            return Finding(Status.NOT_NEEDED, f"the consumer does not call {target}")
        signature = facts.signature(target)
        if signature is None:
            return Finding(
                Status.DRIFT, f"no signature of {target} to be read", None, calls[0].line
            )
        problems = []
        for call in calls:
            bound = bind(signature, call)
            if bound.verdict is Verdict.BINDS:
                continue
            repaired = bind(signature, _repaired(call, signature.takes, drop, add))
            if repaired.verdict is not Verdict.BINDS:
                return Finding(Status.DRIFT, f"{target}: {bound.problem}", None, call.line)
            problems.append((call.line, bound.problem))
        if not problems:
            return Finding(Status.NOT_NEEDED, "the call binds", None, calls[0].line)
        line, problem = problems[0]
        return Finding(Status.NEEDED, f"{target.rpartition('.')[2]}: {problem}", None, line)

    return probe


def _repaired(
    call: Call, takes: Callable[[str], bool], drop: tuple[str, ...], add: tuple[str, ...]
) -> Call:
    kept = tuple(name for name in call.keywords if name not in drop or takes(name))
    added = tuple(name for name in add if name not in kept and takes(name))
    return replace(call, keywords=kept + added)


def function_text(text: str, qualname: str) -> str | None:
    """The source of a function or class, its decorators included.

    Returns:
        The lines without trailing blanks, of every definition where there are several (overloads,
        conditions, a later one by hand); None where there is none, or the text is no Python.
    """
    module = _parsed(text)
    found: list[Any] = [] if module is None else [module]
    for name in qualname.split("."):
        found = [inner for scope in found for inner in _defined_in(scope, name)]
    lines = text.split("\n")
    wanted: list[str] = []
    for definition in found:
        start = min(each.lineno for each in (definition, *definition.decorator_list))
        wanted += lines[start - 1 : definition.end_lineno]
    return "\n".join(line.rstrip() for line in wanted) if found else None


@lru_cache(maxsize=4)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _defined_in(scope: Any, name: str) -> Iterator[_Definition]:
    """Functions and classes of a name in a scope, in its conditions and other blocks too."""
    for block in ("body", "orelse", "finalbody", "handlers"):
        for node in getattr(scope, block, ()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if node.name == name:
                    yield node
            else:
                yield from _defined_in(node, name)


def digest(text: str, qualname: str) -> str | None:
    """First 16 hex digits of the SHA-256 of a function's source; None where it is not defined."""
    source = function_text(text, qualname)
    return None if source is None else hashlib.sha256(source.encode()).hexdigest()[:16]


def line_of(text: str, fragment: str) -> int | None:
    """Number of the first line that holds ``fragment``."""
    for number, line in enumerate(text.splitlines(), 1):
        if fragment in line:
            return number
    return None


def known_function(module: str, qualname: str, known: Mapping[str, Finding], show: str) -> Probe:
    """A probe: looks a function of the consumer up by its digest; unknown text is drift.

    Args:
        module: the consumer's module.
        qualname: the function.
        known: what is known of each text, by digest.
        show: a fragment of the line to point at.
    """

    def probe(facts: Facts) -> Finding:
        text = facts.source_text(module)
        if text is None:
            return Finding(Status.DRIFT, f"no source of {module} to be read")
        found = facts.digest(module, qualname)
        if found is None or found not in known:
            return Finding(
                Status.DRIFT,
                f"{qualname} is none of the texts that are known (digest {found}): "
                "another release, or edited by hand",
                None,
                line_of(text, f"def {qualname.rpartition('.')[2]}("),
            )
        return replace(known[found], line=line_of(text, show))

    return probe


def all_of(*probes: Probe) -> Probe:
    """A probe: drift where any says so; else what the first says."""

    def probe(facts: Facts) -> Finding:
        findings = [one(facts) for one in probes]
        for finding in findings:
            if finding.status is Status.DRIFT:
                return finding
        return findings[0]

    return probe
