"""``eagle3compat plan``: what an extraction will take, before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from eagle3compat.commands.extract import (
    Dtype,
    MaxModelLen,
    StatesDtype,
    TensorParallelSize,
    parse_layers,
)

if TYPE_CHECKING:
    from eagle3compat.kimi.estimate import Estimate


def plan(
    model: Annotated[
        Path,
        typer.Option(help="Folder of the verifier's checkpoint; its config.json is enough."),
    ],
    data: Annotated[
        Optional[Path],  # noqa: UP045 - typer on Python 3.10 reads this form alone
        typer.Option(help="Data set, as for extract: a prepared folder, or a .jsonl file."),
    ] = None,
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Tokens of a data set that is not there yet."),
    ] = None,
    samples: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Samples of a data set that is not there yet."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder that the hidden states are to go to.")] = Path(),
    layers: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Layer ids, as for extract. Default: that of speculators."),
    ] = None,
    max_model_len: MaxModelLen = 2048,
    tensor_parallel_size: TensorParallelSize = 1,
    max_num_batched_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Token budget of one engine step. Default: speculators' own."),
    ] = None,
    dtype: StatesDtype = Dtype.AUTO,
    gpu_memory: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.001, help="GiB that a GPU has. Default: what nvidia-smi says."),
    ] = None,
    tokens_per_second: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.001, help="Rate of extraction, for the time that it takes."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what an extraction will take: disk, GPUs, host memory, time; nothing is loaded.

    Exits with 1 when something will not fit, 2 for bad input.
    """
    from eagle3compat.kimi.estimate import GIB, EstimateSettings, estimate

    found = estimate(
        EstimateSettings(
            model=model,
            data=data,
            tokens=tokens,
            samples=samples,
            out=out,
            layers=None if layers is None else parse_layers(layers),
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype=dtype.value,
            gpu_memory=None if gpu_memory is None else int(gpu_memory * GIB),
            tokens_per_second=tokens_per_second,
        )
    )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show_estimate(found, str(model))
    raise typer.Exit(0 if found.fits else 1)


def show_estimate(found: Estimate, model: str) -> None:
    """A table on a terminal, plain lines elsewhere; then what cannot work or is unknown."""
    from eagle3compat.kimi.estimate import estimate_rows

    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table("what", "how much", title=f"Extraction from {model}", box=box.SIMPLE_HEAD)
        for row in estimate_rows(found):
            table.add_row(*row)
        Console().print(table)
    else:
        for what, much in estimate_rows(found):
            typer.echo(f"{what:<17}{much}")
    for problem in found.problems:
        typer.echo(f"will not work    {problem}")
    for note in found.notes:
        typer.echo(f"note             {note}")
