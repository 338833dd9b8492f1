"""``eagle3compat report``: one page on an extraction, its draft, and how the draft serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that extract wrote to, done or not.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page to write. Default: report.html in the folder.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Folder of a draft that was trained: loss and accuracy.")
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Acceptance lengths that were measured."),
    ] = None,
) -> None:
    """Write one HTML page with plots: tokens, rate, norms, samples set aside, loss, acceptance."""
    from eagle3compat.kimi.report_page import ReportSettings, write_report

    typer.echo(str(write_report(ReportSettings(folder, out, draft, acceptance))))
