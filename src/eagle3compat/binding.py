"""Whether a call binds to a signature, by Python's own rules, before anything is called."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eagle3compat.records import (
    KEYWORD_ONLY,
    POSITIONAL_ONLY,
    POSITIONAL_OR_KEYWORD,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    Call,
    Signature,
)


class Verdict(str, Enum):
    """Whether a call binds."""

    BINDS = "binds"
    BROKEN = "broken"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Bind:
    """A verdict with the problem, or the doubt, in words; ``problem`` is empty where it binds."""

    verdict: Verdict
    problem: str = ""

    @property
    def binds(self) -> bool:
        return self.verdict is Verdict.BINDS

    @property
    def is_broken(self) -> bool:
        return self.verdict is Verdict.BROKEN


def bind(signature: Signature, call: Call) -> Bind:
    """Bind a call's arguments to a signature.

    Args:
        signature: what is called, without ``self``.
        call: how it is called.

    Returns:
        BINDS where the call certainly binds, BROKEN where it certainly does not whatever ``*`` and
        ``**`` arguments hold, else CANNOT_TELL.
    """
    problems = [*_surplus(signature, call), *_missing(signature, call)]
    if problems:
        return Bind(Verdict.BROKEN, "; ".join(problems))
    if call.star or call.double_star:
        return Bind(Verdict.CANNOT_TELL, "the call passes * or ** arguments")
    return Bind(Verdict.BINDS)


def _by_position(signature: Signature) -> list[str]:
    kinds = (POSITIONAL_ONLY, POSITIONAL_OR_KEYWORD)
    return [each.name for each in signature.parameters if each.kind in kinds]


def _surplus(signature: Signature, call: Call) -> list[str]:
    """Arguments that are given and not taken."""
    kinds = {each.name: each.kind for each in signature.parameters}
    by_position = _by_position(signature)
    problems = []
    if call.positional > len(by_position) and VAR_POSITIONAL not in kinds.values():
        problems.append(
            f"takes {len(by_position)} positional arguments but {call.positional} are given"
        )
    for keyword in call.keywords:
        kind = kinds.get(keyword)
        if kind == POSITIONAL_OR_KEYWORD and keyword in by_position[: call.positional]:
            problems.append(f"multiple values for argument '{keyword}'")
        elif kind in (POSITIONAL_OR_KEYWORD, KEYWORD_ONLY) or VAR_KEYWORD in kinds.values():
            continue
        elif kind == POSITIONAL_ONLY:
            problems.append(f"positional-only argument '{keyword}' given by keyword")
        else:
            problems.append(f"unexpected keyword argument '{keyword}'")
    return problems


def _missing(signature: Signature, call: Call) -> list[str]:
    """Required arguments that nothing in the call, * and ** included, can supply."""
    given = set(_by_position(signature)[: call.positional])
    problems = []
    for each in signature.parameters:
        if not each.required or each.name in given:
            continue
        by_name = each.kind != POSITIONAL_ONLY
        by_order = each.kind != KEYWORD_ONLY
        if by_name and (each.name in call.keywords or call.double_star):
            continue
        if by_order and call.star:
            continue
        problems.append(f"missing required argument '{each.name}'")
    return problems
