"""``eagle3compat audit``: whether the files of an extraction are right."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3compat.errors import InputError

if TYPE_CHECKING:
    from eagle3compat.kimi.audit import AuditReport

WIDTH = 100
MOST_SHOWN = 50


def audit(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder that extract wrote to, or one of data_*.pt files that speculators wrote.",
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the verifier. Default: the one that the manifest names."),
    ] = None,
    again: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, metavar="SHARE", help="Share of the samples to extract anew, alone."
        ),
    ] = 0.0,
    count: Annotated[
        int, typer.Option(min=0, help="How many samples to extract anew, at least.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the choice of those samples.")] = 0,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layer ids of files that speculators wrote, as in 2,4,5,7. "
            "Default: that of speculators."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="GPUs that share the verifier then. Default: as the manifest says, or 1."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Files that are read at the same time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Check every sample of an extraction from its files and the checkpoint.

    Exits with 0 if all is right, 1 if something was found, 2 for bad input.
    """
    from eagle3compat.commands.extract import parse_layers
    from eagle3compat.kimi.audit import AuditSettings
    from eagle3compat.kimi.audit import audit as carry_out

    _require_torch()
    settings = AuditSettings(
        folder=folder,
        model=model,
        layers=None if layers is None else parse_layers(layers),
        again_share=again,
        again_count=count,
        seed=seed,
        tensor_parallel_size=tensor_parallel_size,
        **({} if workers is None else {"workers": workers}),
    )
    with _progress() as watch, _output_to_errors():
        report = carry_out(settings, watch)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        show(report)
    return 0 if report.right else 1


def _require_torch() -> None:
    from importlib.util import find_spec

    missing = [package for package in ("torch", "safetensors") if find_spec(package) is None]
    if missing:
        raise InputError(
            f"audit: needs {' and '.join(missing)}, which this Python does not have; run it where "
            "the samples were extracted"
        )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error, with the step that is going on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("reading", total=None)

        def watch(step: str, done: int, whole: int) -> None:
            progress.update(task, description=step, completed=done, total=whole)

        yield watch


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """What an engine and its workers log on standard output goes to standard error.

    Standard output is the report's alone.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def show(report: AuditReport) -> None:
    """Print the report: what was and was not checked, the findings, and a line that sums up."""
    for title, lines in (
        ("checked", report.checked),
        ("not checked", report.not_checked),
        ("note", report.notes),
    ):
        for line in lines:
            _print_wrapped(title, line)
    for layer, (worst, bound) in report.again_worst.items():
        line = f"layer {layer}: largest relative error {worst:.2g}, rounding explains {bound:.2g}"
        _print_wrapped("anew", line)
    if report.findings:
        _print_findings(report)
    size = f"{report.samples:,} samples, {report.tokens:,} tokens, {report.bytes:,} bytes"
    typer.echo(f"{size} audited in {report.seconds:.1f} s")
    found = len(report.findings)
    typer.echo("all right" if report.right else f"found {found} fault{'s' if found > 1 else ''}")


def _print_wrapped(title: str, line: str) -> None:
    import textwrap

    indent = " " * 13
    typer.echo(textwrap.fill(line, WIDTH, initial_indent=f"{title:<13}", subsequent_indent=indent))


def _print_findings(report: AuditReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=False)
    table.add_column("file", overflow="fold", max_width=34)
    table.add_column("fault", no_wrap=True)
    table.add_column("what", overflow="fold")
    for each in report.findings[:MOST_SHOWN]:
        table.add_row(Text(each.place), each.kind.value, Text(each.what))
    console = Console(width=min(WIDTH, Console().width))
    console.print(table)
    left = len(report.findings) - MOST_SHOWN
    if left > 0:
        typer.echo(f"and {left:,} more; --json gives them all")
