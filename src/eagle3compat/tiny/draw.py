"""Random numbers that are the same on every machine and with every NumPy."""

from __future__ import annotations

import hashlib
import math
from typing import Any


class Draw:
    """Random arrays that are the same for a seed and a name on every machine and NumPy version.

    NumPy promises the raw stream of a bit generator, not what `Generator` makes of it. The sum of
    the four 16-bit parts of each word is an exact integer that is nearly normally distributed;
    one multiplication brings it to scale.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def words(self, name: str, count: int) -> Any:
        """`count` raw words, a uint64 array."""
        import numpy as np

        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(count)

    def normal(self, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        """Values round zero with a standard deviation, a float64 array of the shape."""
        import numpy as np

        words = self.words(name, math.prod(shape)).reshape(shape)
        parts = [(words >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
        total = sum(part.astype(np.int64) for part in parts)
        return (total - 2 * 0xFFFF) * (deviation / math.sqrt((2**32 - 1) / 3))

    def order(self, name: str, count: int) -> Any:
        """A permutation of 0 … count-1, an int64 array."""
        return self.words(name, count).argsort(kind="stable")
