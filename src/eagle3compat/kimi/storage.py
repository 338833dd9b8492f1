"""The sample files that speculators' trainer reads, each of them whole or not there.

Format (speculators 0.3.0, ``train/data.py``, ``standardize_data_v1``): a dictionary of
``input_ids`` int64 ``[s]``, ``loss_mask`` int64 ``[s]`` and ``hidden_states``, a list of one
``[s, H]`` tensor a layer whose last is the trainer's target.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from eagle3compat.errors import InputError

if TYPE_CHECKING:
    import torch

# 0.3.0's trainer reads every file below its folder whose name ends in "pt".
UNFINISHED_SUFFIX = ".unfinished"


class _Writer(Protocol):
    def __call__(self, stream: BinaryIO) -> None: ...


def sample_path(folder: Path, index: int) -> Path:
    """The file of sample ``index``, numbered in the order of the data set from 0."""
    return folder / f"data_{index}.pt"


def claim_output_folder(folder: Path) -> None:
    """Make sure that ``folder`` is there, empty and can be written to; it is made if missing.

    Raises:
        InputError: it is no folder, holds something already, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        first = min((entry.name for entry in folder.iterdir()), default=None)
    except FileExistsError:
        raise InputError(f"--out {folder}: is a file, expected a folder") from None
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be used ({error})") from error
    if first is not None:
        raise InputError(
            f"--out {folder}: is in use (holds {first}); the trainer reads every file below it, "
            "so give a new or empty folder"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--out {folder}: cannot be written to")


def write_sample(
    path: Path,
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    hidden_states: Sequence[torch.Tensor],
) -> int:
    """Write one sample file, durably and atomically.

    Args:
        path: from `sample_path`.
        input_ids: s token ids.
        loss_mask: s values of 0 or 1.
        hidden_states: one ``[s, H]`` tensor a layer, in the order of the layer ids.

    Returns:
        The file's size in bytes.
    """
    import torch

    sample = {
        "input_ids": torch.tensor(list(input_ids), dtype=torch.long),
        "loss_mask": torch.tensor(list(loss_mask), dtype=torch.long),
        # A view would be saved with all of the tensor that it looks into.
        "hidden_states": [states.detach().cpu().clone() for states in hidden_states],
    }
    write_whole(path, lambda stream: torch.save(sample, stream))
    return path.stat().st_size


def read_sample(path: Path) -> dict[str, Any]:
    """Read one sample file as the trainer does, without running code from it."""
    import torch

    sample: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return sample


def write_whole(path: Path, write: _Writer) -> None:
    """Let ``write`` fill a file that appears under its name only when all of it is on the disk."""
    unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
    try:
        with unfinished.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # The new name is durable only once its folder is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
