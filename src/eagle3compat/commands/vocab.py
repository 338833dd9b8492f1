"""``eagle3compat vocab``: which of the verifier's tokens a draft can predict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3compat.errors import InputError

if TYPE_CHECKING:
    from eagle3compat.kimi.vocabulary import Vocabulary


def vocab(
    model: Annotated[Path, typer.Option(help="Folder of the verifier's checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder for d2t-….npy, t2d-….npy and their record.")],
    hidden_states: Annotated[
        Path | None, typer.Option(help="Count the samples of this extraction.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Count a prepared data set: rows of input_ids and loss_mask, or a folder."
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens of the draft. Default: 32,000, or all of a smaller verifier's."),
    ] = None,
) -> None:
    """Choose the draft's tokens by speculators' own function: the most frequent to predict."""
    from eagle3compat.kimi.training import shims_applied
    from eagle3compat.kimi.training_data import find_samples, read_samples
    from eagle3compat.kimi.verifier import read_verifier
    from eagle3compat.kimi.vocabulary import count_rows, make_vocabulary, settle_size

    if (hidden_states is None) == (data is None):
        raise InputError("expected one of --hidden-states and --data")
    verifier = read_verifier(model)
    size = settle_size(draft_vocab_size, verifier)
    if data is not None:
        counts, digest = count_rows(data, verifier)
    elif hidden_states is not None:
        found = read_samples(find_samples(hidden_states), verifier)
        counts, digest = found.counts, found.digest
    with shims_applied():
        made = make_vocabulary(out, counts, digest, size, verifier.vocab_size)
    for line in vocabulary_lines(made):
        typer.echo(line)
    typer.echo(f"files        {made.d2t_path(out)}, {made.t2d_path(out).name}")


def vocabulary_lines(vocabulary: Vocabulary) -> Iterator[str]:
    """What a vocabulary covers, for the user."""
    yield (
        f"vocabulary   {vocabulary.size} of {vocabulary.target_size} tokens, "
        f"{vocabulary.coverage:.2%} of what is to be predicted"
    )
    if vocabulary.filled:
        yield (
            f"note         only {vocabulary.occurring} tokens occur; speculators fills up with the "
            f"{vocabulary.filled} lowest token ids that do not"
        )
