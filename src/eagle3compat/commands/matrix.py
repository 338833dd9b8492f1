"""``eagle3compat matrix``: which pairs of builds were run for real, and what came out."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3compat.errors import InputError

if TYPE_CHECKING:
    from packaging.version import Version

    from eagle3compat.matrix import Cell, Matrix

BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
BEGIN_TODAY, END_TODAY = "<!-- today:begin -->", "<!-- today:end -->"
BEGIN_OTHERS, END_OTHERS = "<!-- others:begin -->", "<!-- others:end -->"
"""The lines of a document between which the tables stand."""

_SHIMS = {
    "none": "as shipped",
    "for the CPU": "with what a CPU needs",
    "all": "with eagle3compat",
}

_COLOURS = {"right": "green", "refused": "yellow", "cannot install": "yellow"}
_ACROSS = 6
_LONGEST = 200
"""Characters of a result in a document; the matrix itself has all of it."""


def matrix(
    for_installed: Annotated[
        bool, typer.Option("--for-installed", help="Show the cell nearest to what is installed.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Put the table into this file, from {BEGIN} to {END}."),
    ] = None,
) -> None:
    """Show which vLLM works with which speculators: every pair here was run, none is guessed.

    Each number is the largest relative error of a hidden state against transformers in float32.
    """
    from eagle3compat.matrix import read_matrix

    if for_installed:
        _show_nearest(read_matrix())
    elif write is not None:
        _write(write, read_matrix())
    elif markdown:
        typer.echo(markdown_table(read_matrix()), nl=False)
    else:
        _print_tables(read_matrix())


def markdown_table(matrix: Matrix) -> str:
    """The matrix as a Markdown table: a line a vLLM, a column a speculators."""
    consumers = _consumers(matrix)
    heads = ["vLLM", *(f"speculators {version}" for version in consumers), "transformers", "Python"]
    lines = [heads, ["---"] * len(heads)]
    for vllm in _providers(matrix):
        cells = [matrix.cell(version, vllm) for version in consumers]
        ran = next(cell for cell in cells if cell is not None)
        lines.append([vllm, *map(_words, cells), ran.transformers or "", ran.python])
    return _markdown(lines)


def today_table(matrix: Matrix) -> str:
    """What the builds do by themselves, beside what they do with us, as a Markdown table."""
    lines = [["speculators", "vLLM", *_SHIMS.values()], ["---"] * (2 + len(_SHIMS))]
    cells: dict[tuple[str, ...], Cell] = {
        (cell.speculators, cell.vllm, cell.model, cell.applied): cell
        for cell in matrix.cells
        if cell.runner == "V1"
    }
    alone = [key[:3] for key in cells if key[3] != "all"]
    for key in dict.fromkeys(alone):
        found = [cells.get((*key, applied)) for applied in _SHIMS]
        lines.append([*key[:2], *map(_words, found)])
    return _markdown(lines)


def others_table(matrix: Matrix) -> str:
    """Cells of other models and of model runner V2, as a Markdown table."""
    consumers = _consumers(matrix)
    heads = ["model", "runner", "vLLM", *(f"speculators {version}" for version in consumers)]
    lines = [heads, ["---"] * len(heads)]
    main = {id(cell) for cell in matrix.main_cells}
    cells: dict[tuple[str, ...], Cell] = {
        (cell.model, cell.runner, cell.vllm, cell.speculators): cell
        for cell in matrix.cells
        if cell.applied == "all" and id(cell) not in main
    }
    for key in sorted({key[:3] for key in cells}, key=_by_version):
        found = [cells.get((*key, version)) for version in consumers]
        lines.append([*key, *map(_words, found)])
    return _markdown(lines)


def nearest_lines(matrix: Matrix, speculators: str, vllm: str) -> list[str]:
    """What the matrix says of two versions, or of the nearest that were run.

    Args:
        matrix: the matrix.
        speculators: version that is installed.
        vllm: version that is installed.
    """
    cell = matrix.nearest(speculators, vllm)
    if cell is None:
        return ["the matrix has no cell yet"]
    is_same = (cell.speculators, cell.vllm) == (speculators, vllm)
    return [
        f"installed: speculators {speculators}, vLLM {vllm}",
        f"{'run' if is_same else 'nearest run'}: speculators {cell.speculators}, "
        f"{cell.distribution} {cell.vllm}",
        f"result: {cell.words}",
        f"with: Python {cell.python}, torch {cell.torch}, transformers {cell.transformers}, "
        f"on {cell.date}",
        f"shims: {', '.join(cell.shims) or 'none'}",
    ]


def _show_nearest(matrix: Matrix) -> None:
    from eagle3compat.installed import find_build

    builds = [find_build(package) for package in ("speculators", "vllm")]
    for build in builds:
        if build.version is None:
            raise InputError(f"{build.package} in {build.package_dir} does not tell its version.")
    consumer, provider = (build.version or "" for build in builds)
    for line in nearest_lines(matrix, consumer, provider):
        typer.echo(line)


def _print_tables(matrix: Matrix) -> None:
    from rich.console import Console
    from rich.table import Table

    from eagle3compat.matrix import summary

    console = Console()
    providers = _providers(matrix)
    for first in range(0, len(providers), _ACROSS):
        part = providers[first : first + _ACROSS]
        table = Table("speculators", *part, title="vLLM" if first == 0 else None)
        for consumer in _consumers(matrix):
            table.add_row(consumer, *(_coloured(matrix.cell(consumer, vllm)) for vllm in part))
        console.print(table)
    for cell in matrix.main_cells:
        if cell.result != "right":
            typer.echo(f"speculators {cell.speculators} x vLLM {cell.vllm}: {cell.words}")
    counts = summary(matrix.main_cells)
    typer.echo(", ".join(f"{count} {result}" for result, count in counts.items()) or "no cells")


def _coloured(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    colour = _COLOURS.get(cell.result, "red")
    words = cell.words if cell.result == "right" else cell.result
    return f"[{colour}]{words}[/{colour}]"


def _write(file: Path, matrix: Matrix) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--write: {file} cannot be read as text ({error}).") from error
    text = _with_table(file, text, (BEGIN, END), markdown_table(matrix))
    text = _with_table(file, text, (BEGIN_OTHERS, END_OTHERS), others_table(matrix))
    text = _with_table(file, text, (BEGIN_TODAY, END_TODAY), today_table(matrix))
    file.write_text(text, encoding="utf-8")
    typer.echo(f"{file}: the matrix is written anew")


def _with_table(file: Path, text: str, marks: tuple[str, str], table: str) -> str:
    begin, end = text.find(f"{marks[0]}\n"), text.find(marks[1])
    if not 0 <= begin < end:
        raise InputError(f"--write: {file} has no lines {' and '.join(marks)} round the table.")
    return text[: begin + len(marks[0]) + 1] + table + text[end:]


def _words(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    return textwrap.shorten(cell.words, _LONGEST, placeholder=" …").replace("|", "\\|")


def _markdown(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _by_version(key: tuple[str, ...]) -> tuple[str, str, Version]:
    from packaging.version import Version

    return key[0], key[1], Version(key[2])


def _consumers(matrix: Matrix) -> list[str]:
    from packaging.version import Version

    return sorted({cell.speculators for cell in matrix.main_cells}, key=Version)


def _providers(matrix: Matrix) -> list[str]:
    from packaging.version import Version

    return sorted({cell.vllm for cell in matrix.main_cells}, key=Version)
