"""What a draft is trained on: the sample files of an extraction, or those that speculators wrote.

The folder of an extraction has ``hidden_states/data_{i}.pt`` and manifests; one that speculators'
own script wrote has ``data_{i}.pt`` and, usually, ``data_config.json``.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.dataset import combined_digest
from eagle3compat.kimi.frequencies import count_predicted
from eagle3compat.kimi.manifest import Manifest, input_digest, read_manifests

if TYPE_CHECKING:
    from eagle3compat.kimi.verifier import Verifier

SAMPLE_NAME = re.compile(r"data_(\d+)\.pt")
AUXILIARY_LAYERS = 3
"""EAGLE-3 drafts of speculators take the states of three layers; a fourth is the target."""
LAYERS = AUXILIARY_LAYERS + 1


@dataclass(frozen=True)
class SampleFolder:
    """Sample files and what is known of them without opening one.

    Args:
        folder: what the user named.
        files: the sample files, by number.
        digests: of each file's input (`input_digest`), where a manifest tells.
        expected: samples of the whole data set, where a manifest tells; the files may be fewer.
    """

    folder: Path
    files: tuple[Path, ...]
    digests: tuple[str, ...] | None
    expected: int | None


@dataclass(frozen=True)
class TrainingData:
    """Sample files that were opened and checked.

    Args:
        samples: the files.
        lengths: tokens of each.
        digest: which inputs they hold, whatever their order (`combined_digest`).
        counts: how often each token id is one that the draft learns to predict; those that occur.
    """

    samples: SampleFolder
    lengths: tuple[int, ...]
    digest: str
    counts: dict[int, int]


def find_layers(
    folder: Path, verifier: Verifier, asked_layers: Sequence[int] | None
) -> tuple[int, ...]:
    """Which layers the sample files of a folder hold, in the order of their tensors.

    Args:
        folder: of an extraction, or with the sample files themselves.
        verifier: whose layers they are.
        asked_layers: what the user says the layers are; needed where no file of the folder does.

    Raises:
        InputError: they are unknown, or none that a draft can be trained on and served with.
    """
    _check_folder(folder)
    layers = _settle_layers(folder, read_manifests(folder), asked_layers)
    _check_layers(folder, layers, verifier)
    return layers


def find_samples(folder: Path) -> SampleFolder:
    """Find the sample files of a folder.

    Args:
        folder: of an extraction, or with the sample files themselves.

    Raises:
        InputError: there are none, or one that the manifest lists is missing.
    """
    _check_folder(folder)
    manifests = read_manifests(folder)
    there = _sample_files(folder)
    digests = _digests_of_done(folder, there, manifests) if manifests else None
    files = tuple(there.values()) if digests is None else tuple(there[index] for index in digests)
    if not files:
        raise InputError(
            f"--hidden-states {folder}: holds no data_0.pt, data_1.pt, …, neither itself nor in "
            "hidden_states/; extract first"
        )
    expected = {run.samples for manifest in manifests for run in manifest.runs}
    known = None if digests is None else tuple(digests.values())
    return SampleFolder(folder, files, known, max(expected, default=None))


def read_samples(
    samples: SampleFolder, verifier: Verifier, layers: int | None = None
) -> TrainingData:
    """Open every sample file, without reading its states, and count what there is to be learnt.

    Args:
        samples: the files.
        verifier: whose token ids and hidden size they hold.
        layers: how many tensors each has; None for any number.

    Raises:
        InputError: naming the file that is not what the trainer reads, or not this verifier's.
    """
    lengths: list[int] = []
    digest = combined_digest(())
    counts: Counter[int] = Counter()
    for number, path in enumerate(samples.files):
        input_ids, loss_mask = _input_of(path, verifier, layers)
        lengths.append(len(input_ids))
        tokens, mask = input_ids.tolist(), [int(marked) for marked in loss_mask.tolist()]
        own = input_digest(tokens, mask)
        if samples.digests is not None and own != samples.digests[number]:
            raise InputError(
                f"{path}: holds another input than the one that the manifest says was extracted; "
                "audit the folder"
            )
        digest = combined_digest((digest, own))
        counts.update(count_predicted(tokens, mask))
    return TrainingData(samples, tuple(lengths), digest, dict(sorted(counts.items())))


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"--hidden-states {folder}: no such folder; give that of an extraction")


def _sample_files(folder: Path) -> dict[int, Path]:
    for candidate in (folder / "hidden_states", folder):
        if candidate.is_dir():
            numbered = dict(_numbered(candidate))
            if numbered:
                return dict(sorted(numbered.items()))
    return {}


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir():
        match = SAMPLE_NAME.fullmatch(path.name)
        if match:
            yield int(match[1]), path


def _digests_of_done(
    folder: Path, there: dict[int, Path], manifests: Sequence[Manifest]
) -> dict[int, str]:
    """The samples that can be trained on, by number, each with the digest of its input."""
    records = {index: each for manifest in manifests for index, each in manifest.done.items()}
    done = sorted(records)
    missing = [index for index in done if index not in there]
    if missing:
        raise InputError(
            f"--hidden-states {folder}: data_{missing[0]}.pt is done by the manifest and not there "
            f"({len(missing)} such); run eagle3compat extract again, or audit"
        )
    return {index: records[index].input_digest for index in done}


def _settle_layers(
    folder: Path, manifests: Sequence[Manifest], asked: Sequence[int] | None
) -> tuple[int, ...]:
    found = {run.layers for manifest in manifests for run in manifest.runs}
    if not found:
        found = set(_layers_by_speculators(folder))
    if len(found) > 1:
        listed = " and ".join(str(list(layers)) for layers in sorted(found))
        raise InputError(f"--hidden-states {folder}: was extracted from layers {listed}, mixed")
    if not found:
        if asked is None:
            raise InputError(
                f"--hidden-states {folder}: no file there says which layers were extracted; name "
                "them with --layers, in the order of the tensors, the target's last"
            )
        return tuple(asked)
    (layers,) = found
    if asked is not None and tuple(asked) != layers:
        raise InputError(
            f"--layers {','.join(map(str, asked))}: {folder} was extracted from layers "
            f"{list(layers)}; leave the option out"
        )
    return layers


def _layers_by_speculators(folder: Path) -> Iterator[tuple[int, ...]]:
    """What the ``data_config.json`` of speculators' own script says, where there is one."""
    path = folder / "data_config.json"
    if not path.is_file():
        return
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        ids = config["hidden_states"]["layer_ids"]
        yield tuple(int(layer) for layer in ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected layer ids in it, found: {error!r}") from error


def _check_layers(folder: Path, layers: tuple[int, ...], verifier: Verifier) -> None:
    last = verifier.num_hidden_layers - 1
    verifier.check_layers(layers)
    if len(layers) != LAYERS:
        raise InputError(
            f"--hidden-states {folder}: holds layers {list(layers)}; speculators' EAGLE-3 draft "
            f"takes {AUXILIARY_LAYERS} auxiliary ones and the target"
        )
    if layers[-1] != last:
        raise InputError(
            f"--hidden-states {folder}: the last of layers {list(layers)} is the target, and has "
            f"to be the verifier's last, {last}: its head makes the targets of that state"
        )


def _input_of(path: Path, verifier: Verifier, layers: int | None) -> tuple[Any, Any]:
    """The token ids and the loss mask of a sample file, each an int tensor ``[tokens]``."""
    import torch

    try:
        # Mapped: the states, nearly all of the file, are not read.
        sample = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        input_ids, loss_mask = sample["input_ids"], sample["loss_mask"]
        shapes = [tuple(states.shape) for states in sample["hidden_states"]]
        sizes = tuple(input_ids.shape), tuple(loss_mask.shape)
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise InputError(f"{path}: no sample that the trainer reads ({error})") from error
    count = layers or len(shapes)
    expected = [(len(input_ids), verifier.hidden_size)] * count
    if shapes != expected or sizes[0] != sizes[1] or not len(input_ids):
        raise InputError(
            f"{path}: expected {count} layers of {len(input_ids)} x {verifier.hidden_size} beside "
            f"as many token ids and mask entries; found {shapes} beside {sizes[0]} "
            f"and {sizes[1]}. Audit the folder, or is the verifier another?"
        )
    outside = input_ids[(input_ids < 0) | (input_ids >= verifier.vocab_size)]
    if len(outside):
        raise InputError(
            f"{path}: token id {int(outside[0])} is outside the vocabulary (0 to "
            f"{verifier.vocab_size - 1}); is the verifier another?"
        )
    return input_ids, loss_mask
