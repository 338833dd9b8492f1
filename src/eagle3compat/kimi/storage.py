"""The folder of an extraction, and the sample files in it that speculators' trainer reads.

Format of a sample (speculators 0.3.0, ``train/data.py``, ``standardize_data_v1``): a dictionary of
``input_ids`` int64 ``[s]``, ``loss_mask`` int64 ``[s]`` and ``hidden_states``, a list of one
``[s, H]`` tensor a layer whose last is the trainer's target.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Protocol

from eagle3compat.errors import InputError
from eagle3compat.kimi.manifest import MANIFEST_NAME, manifest_path

if TYPE_CHECKING:
    import torch

# 0.3.0's trainer reads every file below its folder whose name ends in "pt".
UNFINISHED_SUFFIX = ".unfinished"
# Bytes of a sample file beside its tensors, at most, and of one more layer.
FILE_OVERHEAD = 2048
LAYER_OVERHEAD = 256


class _Writer(Protocol):
    def __call__(self, stream: BinaryIO) -> None: ...


@dataclass(frozen=True)
class Shard:
    """A part of a data set: the samples whose number leaves ``number`` when divided by ``count``.

    Args:
        number: from 0.
        count: shards of the data set.
    """

    number: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        """As it stands in the names of files."""
        return f"{self.number}-of-{self.count}"

    def indices(self, samples: int) -> range:
        """The numbers of its samples."""
        return range(self.number, samples, self.count)


WHOLE = Shard()


@dataclass(frozen=True)
class ExtractionFolder:
    """Where an extraction keeps what.

    Args:
        path: the folder that the user named.
        shard: the part of the data set that is written here.
    """

    path: Path
    shard: Shard = WHOLE

    @property
    def samples(self) -> Path:
        """Samples that are proved: the folder to train on."""
        return self.path / "hidden_states"

    @property
    def set_aside(self) -> Path:
        """Samples whose proof failed."""
        return self.path / "set_aside"

    @property
    def unfinished(self) -> Path:
        """This shard's samples whose proof is still to come."""
        return self.path / "unfinished" / self.shard.name

    @property
    def manifest(self) -> Path:
        """This shard's manifest."""
        return manifest_path(self.path, (self.shard.number, self.shard.count))

    @property
    def writer_lock(self) -> Path:
        """What the worker that writes this shard locks."""
        return self.path / "locks" / f"writer-{self.shard.name}"

    def check(self) -> None:
        """Refuse a place that cannot be used; nothing is made.

        Raises:
            InputError: it is no folder, holds something else, or cannot be written to.
        """
        found = _nearest(self.path)
        if not found.is_dir():
            raise InputError(f"--out {self.path}: {found} is a file, expected a folder")
        if not os.access(found, os.W_OK | os.X_OK):
            raise InputError(f"--out {self.path}: {found} cannot be written to")
        if found != self.path:
            return
        entries = sorted(entry.name for entry in self.path.iterdir())
        shards = [match for name in entries if (match := MANIFEST_NAME.fullmatch(name))]
        if entries and not shards and "locks" not in entries:
            raise InputError(
                f"--out {self.path}: is in use (holds {entries[0]}) and has no manifest of an "
                "extraction; give a new or empty folder"
            )
        other = next((match for match in shards if int(match[2]) != self.shard.count), None)
        if other is not None:
            raise InputError(
                f"--out {self.path}: holds {other[0]}, of a data set in {other[2]} shards; "
                f"expected {self.shard.count}. Give the same --shard count, or another folder"
            )

    def check_space(self, needed: int) -> None:
        """Refuse when the disk has less than ``needed`` bytes free."""
        free = shutil.disk_usage(_nearest(self.path)).free
        if needed > free:
            raise InputError(
                f"--out {self.path}: the hidden states need {needed:,} bytes, and {free:,} are "
                "free there; give another folder, or split the data set with --shard"
            )

    def claim(self) -> BinaryIO:
        """Make the folder, and lock this shard of it for as long as the result is kept.

        Files that an earlier run left unfinished are taken away.

        Raises:
            InputError: another run has it, or it cannot be made.
        """
        try:
            for folder in (self.samples, self.set_aside, self.unfinished, self.writer_lock.parent):
                folder.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "locks" / f"run-{self.shard.name}").open("ab")
        except OSError as error:
            raise InputError(f"--out {self.path}: cannot be used ({error})") from error
        if not try_lock(lock):
            lock.close()
            raise InputError(
                f"--out {self.path}: another run is extracting shard {self.shard.name} to it"
            )
        for left in self.unfinished.iterdir():
            left.unlink()
        return lock


def try_lock(file: IO[Any] | int) -> bool:
    """Lock a file, open or as a descriptor, until it is closed; False where another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest of its parents that is there."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def sample_path(folder: Path, index: int) -> Path:
    """The file of sample ``index``, numbered in the order of the data set from 0."""
    return folder / f"data_{index}.pt"


def sample_bytes(tokens: int, layers: int, hidden_size: int, item_size: int) -> int:
    """An upper bound for the size of a sample's file.

    Args:
        tokens: rows of each layer.
        layers: how many there are.
        hidden_size: width of a row.
        item_size: bytes of an element.
    """
    states = tokens * layers * hidden_size * item_size
    return states + 2 * 8 * tokens + FILE_OVERHEAD + LAYER_OVERHEAD * layers


def save_sample(
    path: Path,
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    hidden_states: Sequence[torch.Tensor],
) -> int:
    """Write one sample file, and return when it is on the disk. It does not appear whole.

    Args:
        path: from `sample_path`.
        input_ids: s token ids.
        loss_mask: s values of 0 or 1.
        hidden_states: one ``[s, H]`` tensor a layer, in the order of the layer ids. Each has a
            storage of its own: all of a storage is written.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    import torch

    sample = {
        "input_ids": torch.tensor(list(input_ids), dtype=torch.long),
        "loss_mask": torch.tensor(list(loss_mask), dtype=torch.long),
        "hidden_states": list(hidden_states),
    }
    try:
        torch.save(sample, path)
    except RuntimeError as error:  # torch's stream does not say why
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        raise OSError(f"{path}: {error}; {free:,} bytes are free on its disk") from error
    return sync_file(path)


def sync_file(path: Path) -> int:
    """Return a file's size when all of it is on the disk."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size


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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk: a new name is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
