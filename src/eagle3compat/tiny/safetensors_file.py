"""Writes safetensors files, bfloat16 included, from NumPy alone and always the same bytes.

The ``safetensors`` package takes bfloat16 from torch or from buffers whose form differs between
its releases, and does not promise the order of its header. The format itself is a length, a JSON
header and the tensors' bytes: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """A tensor as the file holds it.

    Args:
        dtype: the format's name of the element type, ``"BF16"`` or ``"F32"``.
        shape: its dimensions.
        data: the elements in row-major order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bfloat16(values: Any) -> Tensor:
    """Rounds an array of finite floats of any shape to bfloat16, to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    ties_to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + ties_to_even) >> np.uint32(16)
    return Tensor("BF16", rounded.shape, rounded.astype("<u2").tobytes())


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors by name, the wider element types first, so that each lies aligned.

    Args:
        path: the file to write.
        tensors: the tensors.
    """
    ordered = sorted(tensors.items(), key=lambda item: item[1].dtype != "F32")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file: a padded header keeps the elements aligned.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.writelines(tensor.data for _, tensor in ordered)
