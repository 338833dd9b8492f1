"""``eagle3compat shims``: the catalogue, made from the records of the shims."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from eagle3compat.errors import InputError
from eagle3compat.shim import Shim, all_shims

BEGIN, END = "<!-- shims:begin -->", "<!-- shims:end -->"
"""The lines of a document between which the catalogue stands."""

_COLUMNS = (
    "shim",
    "what it repairs",
    "stage",
    "process",
    "without it",
    "speculators",
    "vLLM",
    "transformers",
    "mended in",
    "remove when",
)
_RANGES = ("speculators", "vLLM", "transformers")


def shims(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Put the Markdown table into this file, between {BEGIN} and {END}.",
        ),
    ] = None,
) -> None:
    """List every shim: what it repairs and where, what happens without it, and until when.

    Versions say where a shim is expected to be needed; whether it is, the code decides:
    see verify-patches.
    """
    if write is not None:
        _write(write)
    elif markdown:
        typer.echo(markdown_table(), nl=False)
    else:
        _print_table()


def markdown_table() -> str:
    """The catalogue as a Markdown table, a line a shim in the order in which they are applied."""
    rule = " | ".join("---" for _ in _COLUMNS)
    rows = [" | ".join(_markdown_cells(record)) for record in all_shims()]
    lines = [" | ".join(_COLUMNS), rule, *rows]
    return "".join(f"| {line} |\n" for line in lines)


def catalogue_in(text: str, name: str) -> tuple[int, int]:
    """Where the catalogue of a document begins and ends.

    Args:
        text: the document.
        name: what to call it in an error.

    Raises:
        InputError: the document does not have the two marks once each, in order.
    """
    begin, end = text.find(f"{BEGIN}\n"), text.find(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or not 0 <= begin < end:
        raise InputError(
            f"{name}: expected the lines {BEGIN} and {END} once each, in that order, round the "
            "table of shims; add them where the table shall stand."
        )
    return begin + len(BEGIN) + 1, end


def _write(file: Path) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--write: {file} cannot be read as text ({error}).") from error
    begin, end = catalogue_in(text, str(file))
    new = text[:begin] + markdown_table() + text[end:]
    if new == text:
        typer.echo(f"{file}: the table of shims is as it should be")
        return
    try:
        file.write_text(new, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--write: {file} cannot be written ({error}).") from error
    typer.echo(f"{file}: the table of shims is written anew")


def _cells(record: Shim) -> Iterator[str]:
    yield record.id
    yield record.title
    yield " and ".join(stage.value for stage in record.stages)
    yield record.process.value
    yield "wrong numbers" if record.silent else "an error"
    yield record.consumers
    yield record.expected or "any"
    yield record.transformers or "any"
    yield record.mended_in
    yield record.remove_when


def _markdown_cells(record: Shim) -> Iterator[str]:
    module = record.id.replace("-", "_")
    for column, cell in zip(_COLUMNS, _cells(record), strict=True):
        escaped = cell.replace("|", "\\|")
        if column == "shim":
            yield f"[{escaped}](shims/{module}.py)"
        elif column in _RANGES and cell != "any":
            yield f"`{escaped}`"
        else:
            yield escaped


def _print_table() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column in ("shim", "stage", "process"))
    for record in all_shims():
        table.add_row(*_cells(record))
    Console().print(table)
