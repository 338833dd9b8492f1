"""What changed between two vLLM builds in anything that a contract or a call touches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3compat.cache import FactsCache
from eagle3compat.demands import consumer_modules
from eagle3compat.errors import BuildNotFoundError
from eagle3compat.facts import Facts
from eagle3compat.installed import Build
from eagle3compat.records import (
    Attribute,
    Call,
    Class,
    Function,
    ImportedName,
    Parameter,
    Signature,
    Unknown,
    Use,
)
from eagle3compat.sources import Source, open_source

SCHEMA_VERSION = 1
GONE = "gone"
NEW = "new"
MOVED = "moved"
SIGNATURE = "signature"
BASES = "bases"
VALUE = "value"
BODY = "body"
DOUBT = "cannot tell"


@dataclass(frozen=True)
class Change:
    """One difference in one symbol.

    Args:
        symbol: dotted name, as the consumer uses it.
        kind: gone, new, moved, signature, bases, value, body or cannot tell.
        detail: the difference in words.
        used_at: where the consumer, or a contract, touches the symbol.
    """

    symbol: str
    kind: str
    detail: str
    used_at: tuple[str, ...]


@dataclass(frozen=True)
class Drift:
    """All differences between two builds."""

    before: Build
    after: Build
    symbols: int
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON; ``schema_version`` is raised when a key changes its meaning or goes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "before": {"title": self.before.title, "path": str(self.before.package_dir)},
            "after": {"title": self.after.title, "path": str(self.after.package_dir)},
            "symbols": self.symbols,
            "changes": [{**vars(each), "used_at": list(each.used_at)} for each in self.changes],
        }

    def lines(self) -> Iterator[str]:
        """As text, the changes that can break a call before those that cannot."""
        yield f"before  {self.before.title}, {self.before.package_dir}"
        yield f"after   {self.after.title}, {self.after.package_dir}"
        for change in self.changes:
            if change.kind != BODY:
                yield f"{change.kind:<12}{change.symbol}"
                yield f"{'':<12}{change.detail}"
                yield from (f"{'':<12}used at {place}" for place in change.used_at)
        told = {each.symbol for each in self.changes if each.kind != BODY}
        bodies = [each.symbol for each in self.changes if each.symbol not in told]
        for symbol in bodies:
            yield f"{BODY:<12}{symbol}"
        changed = len(told) + len(bodies)
        yield f"{changed} of {self.symbols} symbols changed, {len(bodies)} in their body alone"


def find_drift(
    before: str | Path | None, after: str | Path | None, speculators: str | Path | None = None
) -> Drift:
    """Compare two vLLM builds in what the shims' contracts and the consumer's calls touch.

    Args:
        before: None for the installed build; or a requirement, a wheel, an sdist or a folder.
        after: likewise.
        speculators: whose demands count; without any installed, the contracts alone do.

    Raises:
        InputError: a build cannot be found, fetched or read.
    """
    consumers: tuple[Source, ...] = ()
    try:
        consumers = (open_source(speculators, "speculators"),)
    except BuildNotFoundError:
        if speculators is not None:
            raise
    cache = FactsCache.of_user()
    first = Facts(open_source(before, "vllm"), *consumers, cache=cache)
    second = Facts(open_source(after, "vllm"), *consumers, cache=cache)
    symbols = touched_symbols(first)
    changes = [
        Change(symbol, kind, detail, tuple(places))
        for symbol, places in sorted(symbols.items())
        for kind, detail in _differences(first, second, symbol)
    ]
    cache.save()
    changes.sort(key=lambda each: each.kind == BODY)
    builds = first.sources["vllm"].build, second.sources["vllm"].build
    return Drift(*builds, len(symbols), tuple(changes))


def touched_symbols(facts: Facts) -> dict[str, list[str]]:
    """vLLM's symbols that contracts and the consumer's text touch, with where they do."""
    from eagle3compat.shim import all_shims

    touched: dict[str, list[str]] = {}

    def touch(symbol: str, place: str) -> None:
        if symbol.startswith("vllm.") and not symbol.endswith("()"):
            places = touched.setdefault(symbol, [])
            if place not in places:
                places.append(place)

    for record in all_shims():
        for contract in record.contracts:
            touch(contract.provider, f"shim {record.id}")
    for module in consumer_modules(facts) if "speculators" in facts.sources else ():
        uses = facts.uses(module)
        demands: tuple[ImportedName | Call | Use, ...] = (
            *uses.imports,
            *uses.calls,
            *uses.attributes,
        )
        for found in demands:
            touch(found.target, f"{module.replace('.', '/')}.py:{found.line}")
    return touched


def _differences(before: Facts, after: Facts, symbol: str) -> Iterator[tuple[str, str]]:
    old, new = before.resolve(symbol), after.resolve(symbol)
    if isinstance(old, Unknown) or isinstance(new, Unknown):
        reasons = {each.reason for each in (old, new) if isinstance(each, Unknown)}
        if type(old) is not type(new):
            yield DOUBT, "; ".join(sorted(reasons))
        return
    if old is None or new is None:
        if old is not None:
            yield GONE, "no longer there"
        elif new is not None:
            yield NEW, f"defined as {new.name}"
        return
    if old.name != new.name:
        yield MOVED, f"defined as {new.name}, was {old.name}"
    yield from _of_signatures(before, after, symbol)
    if isinstance(old, Class) and isinstance(new, Class) and old.bases != new.bases:
        yield BASES, f"{', '.join(new.bases) or 'none'}; was {', '.join(old.bases) or 'none'}"
    if isinstance(old, Attribute) and isinstance(new, Attribute) and old.value != new.value:
        yield VALUE, f"{new.value!r}, was {old.value!r}"
    if isinstance(old, (Function, Class)) and isinstance(new, (Function, Class)):
        texts = [_text_of(before, old), _text_of(after, new)]
        if texts[0] != texts[1]:
            yield BODY, "its text changed"


def _of_signatures(before: Facts, after: Facts, symbol: str) -> Iterator[tuple[str, str]]:
    old, new = before.look_up_signature(symbol), after.look_up_signature(symbol)
    if not isinstance(old, Signature) or not isinstance(new, Signature):
        return
    details = list(_of_parameters(old, new))
    if old.is_async != new.is_async:
        details.append("became a coroutine function" if new.is_async else "no longer async")
    if details:
        yield SIGNATURE, "; ".join(details)


def _of_parameters(old: Signature, new: Signature) -> Iterator[str]:
    was = {each.name: each for each in old.parameters}
    now = {each.name: each for each in new.parameters}
    for name in was:
        if name not in now:
            yield f"{name} removed"
    for name, parameter in now.items():
        if name not in was:
            yield f"{name} added ({'required' if parameter.required else 'optional'})"
        else:
            yield from _of_parameter(was[name], parameter)
    kept = [name for name in was if name in now]
    if kept != [name for name in now if name in was]:
        yield "the order of the parameters changed"


def _of_parameter(old: Parameter, new: Parameter) -> Iterator[str]:
    if old.required != new.required:
        yield f"{new.name} became {'required' if new.required else 'optional'}"
    if old.kind != new.kind:
        yield f"{new.name} became {new.kind}"


def _text_of(facts: Facts, definition: Function | Class) -> str | None:
    from eagle3compat.probes import function_text

    module = definition.name.rpartition(".")[0]
    while module and facts.module(module) is None:
        module = module.rpartition(".")[0]
    text = facts.source_text(module)
    return None if text is None else function_text(text, definition.name[len(module) + 1 :])
