"""Source text for probes: what is installed, with exact edits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3compat.cache import FactsCache
from eagle3compat.facts import Facts
from eagle3compat.shim import GENERATOR, WORKER, Finding, Shim
from eagle3compat.sources import Source

__all__ = [
    "CAPTURE_BY_HAND",
    "CONFIGURE_BY_HAND",
    "CONSTRUCT_BY_HAND",
    "FORWARD_BY_HAND",
    "GENERATE_BY_HAND",
    "GENERATOR",
    "SET_UP_BY_HAND",
    "STORE_BY_HAND",
    "WORKER",
    "Builds",
]

# What somebody who patches site-packages might write into each function of the consumer.
CONSTRUCT_BY_HAND = (GENERATOR, "self._request_counter = 0", "self._request_counter = 1")
CONFIGURE_BY_HAND = (GENERATOR, "max_num_seqs = MAX_NUM_SEQS", "max_num_seqs = 1")
GENERATE_BY_HAND = (GENERATOR, "schedule_iterations += 1", "schedule_iterations += 2")
FORWARD_BY_HAND = (WORKER, "residual = None", "residual = 0")
STORE_BY_HAND = (
    WORKER,
    "[[h] for h in aux_hidden_states]",
    "[[h.cpu()] for h in aux_hidden_states]",
)
SET_UP_BY_HAND = (WORKER, "frozenset(layer_ids)", "tuple(layer_ids)")
CAPTURE_BY_HAND = (WORKER, "torch.cat(layer_tensors, dim=0)", "torch.stack(layer_tensors)")

_kept = FactsCache(None)
"""In memory alone, and shared: edited modules have no fingerprint and are never kept."""


class _Overlay:
    """A source with the text of some modules replaced; None for a module that is gone.

    Args:
        source: what to read the rest from.
        texts: replaced texts by module.
        compiled: modules that are there, but without text.
    """

    def __init__(
        self, source: Source, texts: Mapping[str, str | None], compiled: frozenset[str]
    ) -> None:
        self._source = source
        self._texts = {**texts, **dict.fromkeys(compiled)}
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def text(self, module: str) -> str | None:
        return self._texts[module] if module in self._texts else self._source.text(module)

    def has_text(self, module: str) -> bool:
        return self.text(module) is not None

    def is_package(self, module: str) -> bool:
        return self.has_text(module) and self._source.is_package(module)

    def is_opaque(self, module: str) -> bool:
        return module in self._compiled or self._source.is_opaque(module)

    def fingerprint(self, module: str) -> str | None:
        return None if module in self._texts else self._source.fingerprint(module)


@dataclass(frozen=True)
class Builds:
    """A consumer and its providers, as a probe sees them after the edits so far."""

    sources: tuple[Source, ...]
    texts: dict[str, str | None] = field(default_factory=dict)
    compiled: frozenset[str] = frozenset()

    def facts(self) -> Facts:
        return Facts(
            *(_Overlay(source, self.texts, self.compiled) for source in self.sources), cache=_kept
        )

    def probe(self, shim: Shim) -> Finding:
        return shim.probe(self.facts())

    def text(self, module: str) -> str:
        text = self.facts().source_text(module)
        assert text is not None, f"{module} has no text here"
        return text

    def edited(self, module: str, old: str, new: str) -> Builds:
        """With the one occurrence of ``old`` in a module replaced; fails when there is not one."""
        text = self.text(module)
        assert text.count(old) == 1, f"{module} holds {old!r} {text.count(old)} times, not once"
        return replace(self, texts={**self.texts, module: text.replace(old, new)})

    def without(self, module: str) -> Builds:
        """With a module gone."""
        self.text(module)
        return replace(self, texts={**self.texts, module: None})

    def without_text(self, module: str) -> Builds:
        """With a module there, but compiled."""
        self.text(module)
        return replace(self, compiled=self.compiled | {module})

    def garbled(self, module: str) -> Builds:
        """With a module whose text is no Python."""
        return replace(self, texts={**self.texts, module: self.text(module) + "\n)\n"})

    def with_consumer(self, consumer: Source) -> Builds:
        """With another speculators."""
        kept = tuple(each for each in self.sources if each.build.package != consumer.build.package)
        return replace(self, sources=(*kept, consumer))
