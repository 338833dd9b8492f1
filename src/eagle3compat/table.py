"""Reports as text for people: a table that fits 100 columns, problems first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from eagle3compat.report import Check, Report, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 100
_STYLES = {
    Verdict.BROKEN: "bold red",
    Verdict.CANNOT_TELL: "yellow",
    Verdict.REPAIRED: "cyan",
    Verdict.HOLDS: "green",
}


def console() -> Console:
    """Standard output at no more than 100 columns; colours on a terminal, plain text in a pipe."""
    from rich.console import Console

    made = Console(highlight=False, emoji=False, markup=False)
    made.width = min(made.width, WIDTH) if made.is_terminal else WIDTH
    return made


def show_report(report: Report, out: Console, everything: bool = False) -> None:
    """Print a report.

    Args:
        report: what was found.
        out: where to print.
        everything: also list what holds, and demands that could not be followed.
    """
    for line in head_lines(report):
        out.print(line, soft_wrap=False)
    shown = [each for each in report.checks if everything or each.verdict is not Verdict.HOLDS]
    if shown:
        out.print(_checks_table(report, shown))
    if everything and report.unresolved:
        out.print("not followed, and not called fine:")
        for each in report.unresolved:
            out.print(f"  {short(each.call_site, report)}  {each.symbol}\n    {each.reason}")
    for line in foot_lines(report):
        out.print(line)


def head_lines(report: Report) -> Iterator[str]:
    """Which builds were judged, and from where: people install another than they think."""
    for build in (report.consumer, report.provider, *report.others):
        commit = f", commit {build.commit[:12]}" if build.commit else ""
        name = build.distribution or build.package
        yield f"{name} {build.version or '(no version)'}, {build.kind}{commit}"
        yield f"    {build.package_dir}"
    for note in report.notes:
        yield f"note: {note}"
    for edited in report.edited:
        yield f"edited by hand: {edited.path} differs from its wheel's RECORD"
        if edited.stands_in_for:
            yield f"    the edit stands in for shim {', '.join(edited.stands_in_for)}"


def foot_lines(report: Report) -> Iterator[str]:
    """The counts and the verdict."""
    counts = ", ".join(f"{report.count(each)} {each.value}" for each in Verdict)
    yield f"{counts}; {len(report.unresolved)} not followed (--all lists them)"
    yield {
        Verdict.BROKEN: "BROKEN: extraction fails, or would be wrong, on this pair of builds.",
        Verdict.CANNOT_TELL: "CANNOT TELL: apply() refuses on this pair of builds.",
        Verdict.REPAIRED: "OK: everything holds or is repaired by apply().",
        Verdict.HOLDS: "OK: everything holds.",
    }[report.verdict]


def short(site: str, report: Report) -> str:
    """A place without the folder that the package lies in."""
    for build in (report.consumer, report.provider, *report.others):
        for separator in ("/", "!"):
            prefix = f"{build.root}{separator}"
            if site.startswith(prefix):
                return site[len(prefix) :]
    return site


def _checks_table(report: Report, checks: Iterable[Check]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, width=WIDTH, show_edge=False)
    table.add_column("decision", no_wrap=True, min_width=11)
    table.add_column("call site, and what it needs", width=40, overflow="fold")
    table.add_column("what was found", ratio=1, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict.value, style=_STYLES[check.verdict])
        place = f"{check.call_site.rpartition('/')[2]}\n{_tail(check.symbol)}"
        table.add_row(verdict, place, "\n".join(_found_lines(check, report)))
    return table


def _tail(symbol: str) -> str:
    """A symbol without its modules, whose names are in lower case: ``Scheduler.schedule``."""
    if symbol.startswith("torch."):
        return symbol
    parts = symbol.split(".")
    first = next((n for n, part in enumerate(parts) if part != part.lower()), len(parts) - 1)
    return ".".join(parts[first:])


def _found_lines(check: Check, report: Report) -> Iterator[str]:
    if check.reason:
        yield check.reason
    if check.verdict in (Verdict.BROKEN, Verdict.CANNOT_TELL):
        if check.passes:
            yield f"passes {check.passes}"
        if check.takes:
            yield f"takes {check.takes}"
        if check.defined_at:
            yield f"in {short(check.defined_at, report)}"
    if check.expected.startswith("expected"):
        yield check.expected
    if check.verdict is Verdict.REPAIRED and check.shim:
        yield f"shim {check.shim}"
    elif check.remedy:
        yield check.remedy
