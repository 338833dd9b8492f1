"""Sample files held against each other and against the checkpoint, where no manifest is there.

- `Twins`: samples with other tokens cannot have the same layer.
- `Beginnings`: a state depends on the tokens up to its own. So samples that begin with the same
  tokens have the same rows there, but for rounding; requests that were mixed up, cut or moved break
  that. A row that only one sample has is not reached.
- `Norms`: in all samples the layers' mean norms keep their proportions, so one in which two layers
  are exchanged stands out, where layers differ enough.
- `TextFit`: through final norm and ``lm_head``, a right last state gives the token that follows in
  the text a larger logit than it gives to tokens drawn from other samples. The share of those that
  it beats is about one half where states and text do not belong together, somewhat more where the
  states are those of another place in it. This tells something only where the verifier models its
  text: if less than a quarter of the samples shows that, none is judged.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations
from typing import TYPE_CHECKING, Any

from eagle3compat.kimi.agreement import compare_rows
from eagle3compat.kimi.findings import Kind, ranges, rows_in_words
from eagle3compat.kimi.threads import in_threads

if TYPE_CHECKING:
    from eagle3compat.kimi.output_head import OutputHead
    from eagle3compat.kimi.sample_scan import SampleScan

Load = Callable[[int], dict[str, Any]]
"""Gives the content of the file of a sample, by its number."""
Fault = tuple[int, Kind, str]
"""Number of a sample, and what is wrong with it."""

# Beginnings of these lengths are looked up; what is compared is all that two samples share.
BEGINNING_LENGTHS = (1, 4, 16, 64, 256, 1024)
# Samples with one beginning that later ones are compared with; three, so that a wrong one is told.
WITNESSES = 3
MOST_ROWS_COMPARED = 512

# Samples that it takes to know the layers' proportions.
FEWEST_NORMS = 5
# Deviations (median ones) that a norm may be off by; the proportions must differ by twice as many.
NORM_DEVIATIONS = 8.0
SMALLEST_DEVIATION = 0.005

# Positions of a sample whose next token is looked at, and tokens that each is held against.
POSITIONS, RIVALS = 64, 64
FEWEST_POSITIONS = 16
# Share of rivals beaten, in a quarter of the samples at least, where the verifier models its text.
MODELLED = 0.8
# By how much more the tokens some places off must beat, for the states to be theirs.
PLACE_MARGIN = 0.1
# Places off that are tried in every sample, and in those that are doubtful.
NEAR = (-1, 1)
FAR = tuple(place for place in range(-64, 65) if place)
# Tokens kept to draw rivals from.
POOL = 1 << 14
# Samples whose states are tried with the text of each other, to name what was exchanged.
MOST_OWNERS = 64


class Twins:
    """Looks for a layer that two samples, or two places in one sample, have in common."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, str], tuple[int, str]] = {}

    def add(self, index: int, scan: SampleScan) -> Iterator[Fault]:
        """What a further sample has in common with earlier ones of other tokens."""
        counts = Counter(scan.checksums)
        same = [place for place, each in enumerate(scan.checksums) if counts[each] > 1]
        if same:
            yield index, Kind.LAYERS, f"layers at places {ranges(same)} are the same"
        tokens = blake2b(repr(scan.input_ids).encode(), digest_size=16).hexdigest()
        shared: dict[int, list[int]] = defaultdict(list)
        for place, checksum in enumerate(scan.checksums):
            owner, text = self._owners.setdefault((place, checksum), (index, tokens))
            if text != tokens:
                shared[owner].append(place)
        for owner, places in shared.items():
            states = "the states"
            if len(places) < len(scan.layers):
                states = f"the layers at places {ranges(places)}"
            yield index, Kind.ANOTHER_SAMPLE, f"has {states} of sample {owner}, of other tokens"


class Beginnings:
    """Compares the rows of samples that begin with the same tokens.

    Args:
        layer_id: gives the layer id of a place, which decides what rounding explains.
    """

    def __init__(self, layer_id: Callable[[int], int]) -> None:
        self._layer_id = layer_id
        self._witnesses: dict[bytes, list[int]] = defaultdict(list)
        self._disagreements: dict[tuple[int, int], str] = {}
        self.compared = 0

    def add(self, index: int, sample: dict[str, Any], load: Load) -> None:
        """Compare a further sample with earlier ones.

        Args:
            index: its number.
            sample: content of its file, with a row a token in every layer.
            load: for the others.
        """
        input_ids = sample["input_ids"].tolist()
        keys = [
            blake2b(repr(input_ids[:length]).encode(), digest_size=16).digest()
            for length in BEGINNING_LENGTHS
            if length <= len(input_ids)
        ]
        longest = next((key for key in reversed(keys) if key in self._witnesses), None)
        if longest is not None:
            self.compared += 1
            for other in self._witnesses[longest]:
                difference = self._difference(sample, load(other))
                if difference is not None:
                    self._disagreements[other, index] = difference
        for key in keys:
            if len(self._witnesses[key]) < WITNESSES:
                self._witnesses[key].append(index)

    def _difference(self, one: dict[str, Any], other: dict[str, Any]) -> str | None:
        pairs = zip(one["input_ids"].tolist(), other["input_ids"].tolist(), strict=False)
        same = 0
        for mine, others in pairs:
            if mine != others or same == MOST_ROWS_COMPARED:
                break
            same += 1
        layers = zip(one["hidden_states"], other["hidden_states"], strict=False)
        for place, (mine, others) in enumerate(layers):
            if mine.shape[1] != others.shape[1] or mine.dtype != others.dtype:
                return None  # found by shape
            agreement = compare_rows(mine[:same], others[:same], self._layer_id(place))
            if not agreement.holds:
                rows = rows_in_words(agreement.faulty_rows)
                return (
                    f"{rows} of the layer at place {place} differ"
                    f"{'s' if len(agreement.faulty_rows) == 1 else ''}, though the first {same} "
                    f"tokens are the same (relative error {agreement.worst:.2g}; rounding "
                    f"explains {agreement.bound:.2g})"
                )
        return None

    def faults(self, known: Collection[int]) -> Iterator[Fault]:
        """The fewest samples that explain what differs, those in most disagreements first.

        Args:
            known: samples that are wrong by other signs, which explain what differs from them.
        """
        left = {
            pair: what
            for pair, what in self._disagreements.items()
            if pair[0] not in known and pair[1] not in known
        }
        while left:
            counts = Counter(index for pair in left for index in pair)
            (worst, most), *others = counts.most_common()
            (one, other), difference = next(item for item in left.items() if worst in item[0])
            partner = other if worst == one else one
            whom = f"from sample {partner}: {difference}"
            if most == 1 and any(index == partner and count == 1 for index, count in others):
                whom += f"; it or sample {partner} is wrong"
            yield worst, Kind.ROWS, whom
            left = {pair: what for pair, what in left.items() if worst not in pair}


class Norms:
    """Looks for samples whose layers' mean norms are those of exchanged layers."""

    def __init__(self) -> None:
        self._logarithms: dict[int, list[float]] = {}

    def add(self, index: int, scan: SampleScan) -> None:
        """Take the norms of a further sample, in which no layer is zero or not finite."""
        norms = [layer.mean_norm for layer in scan.layers]
        if all(0 < norm < math.inf for norm in norms):
            self._logarithms[index] = [math.log(norm) for norm in norms]

    def faults(self, indices: Sequence[int]) -> tuple[list[Fault], str | None]:
        """Samples that stand out, and what could not be told.

        Args:
            indices: of the samples to judge, which have as many layers each.
        """
        logarithms = {each: self._logarithms[each] for each in indices if each in self._logarithms}
        if len(logarithms) < FEWEST_NORMS:
            return [], f"exchanged layers, by norms: fewer than {FEWEST_NORMS} samples"
        columns = list(zip(*logarithms.values(), strict=True))
        middles = [statistics.median(column) for column in columns]
        spreads = [
            max(SMALLEST_DEVIATION, statistics.median(abs(each - middle) for each in column))
            for column, middle in zip(columns, middles, strict=True)
        ]
        pairs = list(combinations(range(len(columns)), 2))
        apart = [pair for pair in pairs if _apart(*pair, middles, spreads)]
        alike = [f"{one} and {other}" for one, other in pairs if (one, other) not in apart]

        def deviation(norms: Sequence[float]) -> float:
            parts = zip(norms, middles, spreads, strict=True)
            return max((abs(norm - middle) / spread for norm, middle, spread in parts), default=0.0)

        faults: list[Fault] = []
        for index, norms in logarithms.items():
            if deviation(norms) <= NORM_DEVIATIONS:
                continue
            for one, other in apart:
                exchanged = [*norms]
                exchanged[one], exchanged[other] = norms[other], norms[one]
                if deviation(exchanged) <= NORM_DEVIATIONS:
                    what = f"layers at places {one} and {other} are exchanged, by their norms"
                    faults.append((index, Kind.LAYERS, what))
                    break
        if not alike:
            return faults, None
        return faults, f"exchanged layers, by norms, at places {', '.join(alike)}: norms too alike"


def _apart(one: int, other: int, middles: Sequence[float], spreads: Sequence[float]) -> bool:
    gap = abs(middles[one] - middles[other])
    return gap >= 2 * NORM_DEVIATIONS * max(spreads[one], spreads[other])


@dataclass(frozen=True)
class _Fit:
    """How well the last states of one sample fit its text.

    Args:
        shares: of the rivals that are beaten: at 0 by the next tokens, at d by those d places on.
        positions: that were looked at.
    """

    shares: dict[int, float]
    positions: int

    @property
    def share(self) -> float:
        """Of the rivals that the next tokens beat."""
        return self.shares[0]

    @property
    def by_chance(self) -> bool:
        """Whether chance explains the share: one unrelated text in 20 beats more rivals."""
        return self.share <= 0.5 + 1.65 / math.sqrt(12 * self.positions)

    def better_place(self, usual: float) -> int | None:
        """How many places on the text is that the states fit, if they clearly do.

        Args:
            usual: share that states beat which belong to their text.
        """
        place = max(self.shares, key=lambda each: self.shares[each])
        enough = max(MODELLED, usual - PLACE_MARGIN / 2, self.share + PLACE_MARGIN)
        return place if place and self.shares[place] >= enough else None


class TextFit:
    """Looks for samples whose last states do not belong to their text.

    Args:
        head: of the verifier.
        seed: of what is drawn.
        threads: how many judge samples.
    """

    def __init__(self, head: OutputHead, seed: int, threads: int) -> None:
        self._head = head
        self._seed = seed
        self._threads = threads
        self._random = random.Random(seed)
        self._pool: list[int] = []
        self._lengths: dict[int, int] = {}

    def add(self, index: int, scan: SampleScan) -> None:
        """Take the tokens of a further sample, all of them in the vocabulary."""
        self._lengths[index] = len(scan.input_ids)
        few = self._random.sample(scan.input_ids, min(RIVALS, len(scan.input_ids)))
        self._pool += few
        if len(self._pool) > 2 * POOL:
            self._pool = self._random.sample(self._pool, POOL)

    def faults(
        self, indices: Sequence[int], load: Load, watch: Callable[[int, int], None]
    ) -> tuple[list[Fault], str | None]:
        """Samples whose states do not fit their text, and what could not be told.

        Args:
            indices: of the samples to judge.
            load: for them.
            watch: told how many of them are done.
        """
        long = [index for index in indices if self._lengths.get(index, 0) > FEWEST_POSITIONS]
        fits: dict[int, _Fit] = {}
        near = in_threads(lambda each: self._fit(load(each), NEAR), long, self._threads)
        for number, (index, fit) in enumerate(zip(long, near, strict=True), start=1):
            fits[index] = fit
            watch(number, len(long))
        if not fits:
            return [], f"text: no sample has more than {FEWEST_POSITIONS} tokens"
        shares = sorted((fit.share for fit in fits.values()), reverse=True)
        usual = shares[len(shares) // 4]
        if usual < MODELLED:
            return [], (
                "text: the verifier does not model it (three samples in four beat less than "
                f"{usual:.2f} of other tokens with their own; {MODELLED} are needed)"
            )
        doubtful = [index for index, fit in fits.items() if fit.share < MODELLED]
        far = in_threads(lambda each: self._fit(load(each), FAR), doubtful, self._threads)
        fits |= dict(zip(doubtful, far, strict=True))
        faults = []
        for index, fit in fits.items():
            fault = self._fault(index, fit, usual, doubtful, load)
            if fault is not None:
                faults.append((index, Kind.TEXT, fault))
        known = {index for index, _, _ in faults}
        untold = [index for index in doubtful if index not in known]
        untold += [index for index in indices if index not in fits]
        if not untold:
            return faults, None
        return faults, f"text: too short or too hard to predict to tell, samples {ranges(untold)}"

    def _fault(
        self, index: int, fit: _Fit, usual: float, doubtful: Sequence[int], load: Load
    ) -> str | None:
        """What is wrong with the states of a sample, by its text; None if nothing is seen."""
        what = (
            "its last states do not belong to its tokens: the next ones beat "
            f"{fit.share:.2f} of others, {usual:.2f} and more in the best quarter of the samples"
        )
        place = fit.better_place(usual)
        if place is not None:
            side = "after" if place > 0 else "before"
            places = f"{abs(place)} place{'s' * (abs(place) > 1)}"
            return f"{what}; they fit those {places} {side} them"
        if not fit.by_chance:
            return None
        sample = load(index)
        for other in doubtful[:MOST_OWNERS]:
            if other == index or self._lengths[other] != self._lengths[index]:
                continue
            tokens = {"input_ids": load(other)["input_ids"]}
            if self._fit({**sample, **tokens}, ()).share >= MODELLED:
                return f"{what}; they fit those of sample {other}"
        return what

    def _fit(self, sample: dict[str, Any], displacements: Sequence[int]) -> _Fit:
        import torch

        states, tokens = sample["hidden_states"][-1], sample["input_ids"]
        # The same draw for the same text, whichever thread is quicker.
        draw = random.Random(f"{self._seed} {tokens.tolist()}")
        places = range(len(tokens) - 1)
        choice = sorted(draw.sample(places, min(POSITIONS, len(places))))
        rivals = torch.tensor(draw.choices(self._pool, k=RIVALS))
        positions = torch.tensor(choice)
        normalized = self._head.normalize(states[positions])
        logits = normalized @ self._head.rows(rivals, states.dtype).T
        shares = {}
        for displacement in (0, *displacements):
            following = positions + 1 + displacement
            inside = (following >= 0) & (following < len(tokens))
            if displacement and int(inside.sum()) < FEWEST_POSITIONS // 2:
                continue
            own = tokens[following[inside]]
            rows = self._head.rows(own, states.dtype)
            own_logits = (normalized[inside] * rows).sum(dim=-1, keepdim=True)
            beaten = (logits[inside] < own_logits).float()
            # A rival that is the token itself is beaten half the time, as by chance.
            beaten[rivals == own[:, None]] = 0.5
            shares[displacement] = float(beaten.mean())
        return _Fit(shares, len(choice))
