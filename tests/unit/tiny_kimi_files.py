"""Reads a checkpoint's files without the packages that the tests judge."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the bytes behind it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    return header, content[8 + length :]


def read_weights(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, as a float32 NumPy array, by name."""
    import numpy as np

    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, data = read_shard(path)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if entry["dtype"] == "F32":
                values = np.frombuffer(data[start:end], dtype="<f4")
            else:
                bits = np.frombuffer(data[start:end], dtype="<u2").astype(np.uint32)
                values = (bits << np.uint32(16)).view(np.float32)
            weights[name] = values.reshape(entry["shape"])
    return weights
