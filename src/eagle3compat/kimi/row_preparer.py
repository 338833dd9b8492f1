"""Rows of a data set as samples: nothing is dropped or cut without a count and a reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.conversation_rows import Row
from eagle3compat.kimi.conversations import Rendered, Renderer, load_tokenizer, normalize_turns
from eagle3compat.kimi.dataset import (
    Sample,
    check_sample,
    combined_digest,
    parse_row,
    row_kind,
    sample_from_token_ids,
)
from eagle3compat.kimi.frequencies import count_predicted
from eagle3compat.kimi.manifest import input_digest
from eagle3compat.kimi.speculators_masks import SpeculatorsMasks, find_speculators_masks
from eagle3compat.kimi.verifier import read_verifier

OURS, SPECULATORS = "eagle3compat", "speculators"
TOKEN_IDS = "rows of token ids"

NO_ROW = "no row that can be read"
NO_CONVERSATION = "no conversation that can be read"
NOT_RENDERED = "the chat template cannot render it, or its mask cannot be told"
TOO_LONG = "longer than the model length"
NOTHING_LEFT = "nothing to learn is left after the cut"
CUT = "cut to the model length"


_COUNTERS = ("dropped", "notes", "through", "frequencies")


@dataclass(frozen=True)
class RowSettings:
    """How rows become samples.

    Attributes:
        model: folder of the verifier's checkpoint; its weights are not needed.
        max_model_len: a sample and the one token that the engine samples must fit in it.
        truncate: cut samples that are longer, and count them, instead of dropping them.
        ask_speculators: let speculators' own preprocessing render what it renders right.
    """

    model: Path
    max_model_len: int = 2048
    truncate: bool = False
    ask_speculators: bool = True


@dataclass
class Tally:
    """Figures of some rows; those of two sets of rows add up.

    Attributes:
        rows: that were read.
        samples: that were written.
        tokens: of all samples.
        marked: tokens of all samples that the loss masks mark.
        longest: tokens of the longest sample.
        dropped: rows and samples that were dropped, by reason.
        cut: samples that were cut.
        notes: rows that something is to be known of, by what it is.
        through: samples by what rendered them.
        frequencies: of the tokens that are to be predicted.
        digest: of the samples (`combined_digest`).
    """

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    marked: int = 0
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    through: Counter[str] = field(default_factory=Counter)
    frequencies: Counter[int] = field(default_factory=Counter)
    digest: str = field(default_factory=lambda: combined_digest(()))

    def add(self, other: Tally) -> None:
        """Add the figures of other rows."""
        self.longest = max(self.longest, other.longest)
        self.digest = combined_digest((self.digest, other.digest))
        for name in ("rows", "samples", "tokens", "marked", "cut"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        """For a part's account: counters as dictionaries, whose keys are text."""
        content = dict(vars(self))
        for name in _COUNTERS:
            content[name] = {str(key): count for key, count in content[name].items()}
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Tally:
        """The inverse of `to_json`."""
        tally = cls(**{**content, **{name: Counter(content[name]) for name in _COUNTERS}})
        tally.frequencies = Counter({int(k): n for k, n in content["frequencies"].items()})
        return tally


@dataclass(frozen=True)
class Chunk:
    """What came of some rows.

    Attributes:
        lines: the samples, as JSON, a line each.
        remarks: rows that were dropped or cut: ``source``, ``what`` and ``reason``.
        tally: the figures.
        route: why speculators' preprocessing was asked, or not.
    """

    lines: bytes
    remarks: list[dict[str, Any]]
    tally: Tally
    route: str


class RowPreparer:
    """Makes samples of rows, in one process.

    Args:
        settings: how.
    """

    def __init__(self, settings: RowSettings) -> None:
        self._settings = settings
        self._verifier = read_verifier(settings.model, needs_weights=False)
        self._renderer: Renderer | None = None
        self._speculators: SpeculatorsMasks | None = None
        self.route = "no row had a conversation"

    def prepare(self, rows: Iterable[Row]) -> Chunk:
        """Samples of some rows; a row that cannot be one is dropped with its reason."""
        lines, remarks, tally = list[bytes](), list[dict[str, Any]](), Tally()
        for row in rows:
            tally.rows += 1
            outcomes = list(self._outcomes(row))
            kept = (each for each in outcomes if isinstance(each, _Kept))
            tally.notes.update({note for each in kept for note in each.notes})
            for outcome in outcomes:
                if isinstance(outcome, _Dropped):
                    tally.dropped[outcome.kind] += 1
                    remarks.append(
                        {"source": row.source, "what": "dropped", "reason": outcome.reason}
                    )
                    continue
                if outcome.cut_from:
                    tally.cut += 1
                    reason = f"{CUT}: {outcome.cut_from} tokens to {len(outcome.input_ids)}"
                    remarks.append({"source": row.source, "what": "cut", "reason": reason})
                lines.append(_line(row.source, outcome))
                tally.add(_tally_of(outcome))
        return Chunk(b"".join(lines), remarks, tally, self.route)

    def _outcomes(self, row: Row) -> Iterator[_Kept | _Dropped]:
        kind = NO_ROW
        try:
            content = row.content if isinstance(row.content, dict) else parse_row(row.content)
            kind = NO_CONVERSATION
            key = row_kind(content)
            if key == "input_ids":
                sample = sample_from_token_ids(row.source, content)
                yield self._fitted(Rendered(sample.input_ids, sample.loss_mask, ()), TOKEN_IDS)
                return
            turns = normalize_turns(content[key])
        except InputError as error:
            yield _Dropped(kind, str(error))
            return
        renderer = self._open()
        try:
            rendered, through = self._render(renderer, turns, content.get("tools"))
        except InputError as error:
            yield _Dropped(NOT_RENDERED, str(error))
            return
        for each in rendered:
            yield self._fitted(each, through)

    def _open(self) -> Renderer:
        """The renderer; the tokenizer is loaded for the first row that needs it."""
        if self._renderer is None:
            self._renderer = Renderer(load_tokenizer(self._settings.model))
            self.route = "speculators' own preprocessing was not asked for"
            if self._settings.ask_speculators:
                self._speculators, self.route = find_speculators_masks(self._renderer)
        return self._renderer

    def _render(
        self, renderer: Renderer, turns: list[dict[str, Any]], tools: object
    ) -> tuple[list[Rendered], str]:
        if self._speculators is not None and not tools:
            theirs = self._speculators.render(turns)
            if theirs is not None:
                return [theirs], SPECULATORS
        return renderer.render(turns, tools), OURS

    def _fitted(self, sample: Rendered, through: str) -> _Kept | _Dropped:
        length, longest = len(sample.input_ids), self._settings.max_model_len - 1
        if length > longest and not self._settings.truncate:
            reason = f"{length} tokens, and one more is sampled: {TOO_LONG} {longest + 1}"
            return _Dropped(TOO_LONG, reason)
        input_ids, loss_mask = sample.input_ids[:longest], sample.loss_mask[:longest]
        if length > longest and not any(loss_mask):
            return _Dropped(NOTHING_LEFT, f"{length} tokens: {NOTHING_LEFT} to {longest}")
        try:
            check_sample(Sample(0, input_ids, loss_mask), self._verifier, longest + 1)
        except InputError as error:
            return _Dropped(NO_CONVERSATION, str(error))
        cut_from = length if length > longest else 0
        return _Kept(input_ids, loss_mask, sample.turns, sample.notes, through, cut_from)


@dataclass(frozen=True)
class _Kept:
    """A sample to write; `cut_from` tokens, if it was cut."""

    input_ids: list[int]
    loss_mask: list[int]
    turns: tuple[int, ...]
    notes: tuple[str, ...]
    through: str
    cut_from: int


@dataclass(frozen=True)
class _Dropped:
    """A row or sample that is not written: the kind of reason, and the reason."""

    kind: str
    reason: str


def _line(source: int, kept: _Kept) -> bytes:
    content: dict[str, Any] = {"input_ids": kept.input_ids, "loss_mask": kept.loss_mask}
    content["source"] = source
    if kept.turns:
        content["turns"] = kept.turns
    return json.dumps(content, separators=(",", ":")).encode("ascii") + b"\n"


def _tally_of(kept: _Kept) -> Tally:
    return Tally(
        samples=1,
        tokens=len(kept.input_ids),
        marked=sum(kept.loss_mask),
        longest=len(kept.input_ids),
        through=Counter([kept.through]),
        frequencies=count_predicted(kept.input_ids, kept.loss_mask),
        digest=combined_digest([input_digest(kept.input_ids, kept.loss_mask)]),
    )
