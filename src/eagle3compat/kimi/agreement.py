"""Whether two extractions of one sample agree, as far as their dtype's rounding lets one tell.

In float32 every row's relative error stays below 1e-4 (`eagle3compat.reference.TOLERANCE`).

In bfloat16 (and float16) two right extractions differ by rounding, since another batch means other
kernels. **The bound on a row** after decoder layer i is ``GROWTH * u * sqrt(8 (i + 1) / 3)``:

- a decoder layer rounds four values of the residual stream's size at most: what attention and the
  feed-forward part give, and both sums. Each errs by up to the unit roundoff u (2^-8 for bfloat16),
  so by u / sqrt(3) on average; errors of i + 1 layers add up as independent ones, and those of
  two extractions too: ``u * sqrt(4 (i + 1) / 3) * sqrt(2)``;
- later layers multiply an early error: ``GROWTH`` allows for four on average. On the tiny
  Kimi-K2.5 an error of the embedding grows sixfold over 8 layers.

A mixture of experts adds rare larger ones: near a tie, rounding sends a token to another expert.
So a tenth of the rows may exceed the bound, but none may err by more than one half (0.3 was the
largest seen between bfloat16 and float32 on random weights), and none may be another row's: **a row
that is half as far from another row as from its own counterpart is that other row's**.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3compat.reference import TOLERANCE

if TYPE_CHECKING:
    import torch

GROWTH = 4.0
ROUTED_ELSEWHERE = 0.1
NEARER = 0.5
LARGEST_ERROR = 0.5


@dataclass(frozen=True)
class Agreement:
    """How far one layer of a sample is from the same layer, extracted anew.

    Args:
        rows: rows of the layer.
        worst: largest relative error of a row.
        bound: what rounding explains.
        beyond: rows whose error is larger.
        wrong: rows that no rounding and no routing explains.
        strict: whether none may be beyond the bound.
    """

    rows: int
    worst: float
    bound: float
    beyond: tuple[int, ...]
    wrong: tuple[int, ...]
    strict: bool

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference."""
        allowed = 0 if self.strict else math.floor(ROUTED_ELSEWHERE * self.rows)
        return not self.wrong and len(self.beyond) <= allowed

    @property
    def faulty_rows(self) -> tuple[int, ...]:
        """The rows that differ."""
        return () if self.holds else tuple(sorted({*self.beyond, *self.wrong}))


def rounding_bound(dtype: torch.dtype, layer: int) -> float:
    """The relative error of a row after decoder layer ``layer`` that rounding explains."""
    import torch

    if dtype in (torch.float32, torch.float64):
        return TOLERANCE
    roundoff: float = torch.finfo(dtype).eps / 2
    return GROWTH * roundoff * math.sqrt(8 * (layer + 1) / 3)


def compare_rows(found: torch.Tensor, expected: torch.Tensor, layer: int) -> Agreement:
    """Compare the rows of one layer, of equal shape [rows, hidden size] and dtype.

    Args:
        found: what a file holds.
        expected: the same, extracted anew.
        layer: id of the decoder layer that they are the output of.
    """
    import torch

    strict = found.dtype in (torch.float32, torch.float64)
    bound = rounding_bound(found.dtype, layer)
    here, there = found.float(), expected.float()
    distances = (here - there).norm(dim=-1)
    errors = torch.where(distances == 0, 0.0, distances / there.norm(dim=-1))
    errors = torch.nan_to_num(errors, nan=math.inf, posinf=math.inf)
    wrong = errors > LARGEST_ERROR
    if not strict:
        wrong |= _is_another_row(here, there, distances)
    worst = float(errors.max()) if len(errors) else 0.0
    return Agreement(len(errors), worst, bound, _places(errors > bound), _places(wrong), strict)


def _is_another_row(
    here: torch.Tensor, there: torch.Tensor, distances: torch.Tensor
) -> torch.Tensor:
    import torch

    apart = torch.cdist(here, there)
    apart.fill_diagonal_(math.inf)
    return apart.amin(dim=-1) < NEARER * distances


def _places(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())
