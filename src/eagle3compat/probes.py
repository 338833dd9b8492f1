"""How shims ask facts: does a call bind, and is a function of the consumer one that we know?"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

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
        The lines without trailing blanks; None where it is not defined once in its scope, or the
        text is no Python.
    """
    scope: ast.Module | _Definition | None = _parsed(text)
    for name in qualname.split("."):
        scope = None if scope is None else _defined_in(scope, name)
    if scope is None or isinstance(scope, ast.Module):
        return None
    start = min(each.lineno for each in (scope, *scope.decorator_list))
    lines = text.split("\n")[start - 1 : scope.end_lineno]
    return "\n".join(line.rstrip() for line in lines)


@lru_cache(maxsize=4)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _defined_in(scope: ast.Module | _Definition, name: str) -> _Definition | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in scope.body if isinstance(node, kinds) and node.name == name]
    return found[0] if len(found) == 1 else None


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
        found = digest(text, qualname)
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
