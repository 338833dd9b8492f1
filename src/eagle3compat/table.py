"""Reports as text for people: a table that fits 100 columns, problems first.

Laid out here and not by a library: importing one takes longer than the layout, and as long as a
tenth of what the whole check may take.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import TextIO

from eagle3compat.report import Check, Report, Verdict

WIDTH = 100
_VERDICT_WIDTH = 13
_PLACE_WIDTH = 42
_COLOURS = {
    Verdict.BROKEN: "31;1",
    Verdict.CANNOT_TELL: "33",
    Verdict.REPAIRED: "36",
    Verdict.HOLDS: "32",
}


def show_report(report: Report, everything: bool = False, out: TextIO | None = None) -> None:
    """Print a report.

    Args:
        report: what was found.
        everything: also list what holds, and demands that could not be followed.
        out: standard output by default; colours go to a terminal alone.
    """
    stream = out or sys.stdout
    for line in report_lines(report, everything, stream.isatty()):
        print(line, file=stream)


def report_lines(report: Report, everything: bool = False, colour: bool = False) -> Iterator[str]:
    """The lines of a report."""
    yield from head_lines(report)
    shown = [each for each in report.checks if everything or each.verdict is not Verdict.HOLDS]
    if shown:
        yield ""
        yield from _table(shown, report, colour)
        yield ""
    if everything and report.unresolved:
        yield "not followed, and not called fine:"
        for each in report.unresolved:
            yield from _wrapped(f"{short(each.call_site, report)}  {each.symbol}", "  ")
            yield from _wrapped(each.reason, "    ")
    yield from foot_lines(report)


def head_lines(report: Report) -> Iterator[str]:
    """Which builds were judged, and from where: people install another than they think."""
    for build in (report.consumer, report.provider, *report.others):
        commit = f", commit {build.commit[:12]}" if build.commit else ""
        name = build.distribution or build.package
        yield f"{name} {build.version or '(no version)'}, {build.kind}{commit}"
        yield f"    {build.package_dir}"
    for note in report.notes:
        yield from _wrapped(f"note: {note}", "", "      ")
    for edited in report.edited:
        yield f"edited by hand, not as its wheel's RECORD has it: {edited.path}"
        if edited.stands_in_for:
            yield f"    the edit stands in for shim {', '.join(edited.stands_in_for)}"


def foot_lines(report: Report) -> Iterator[str]:
    """The counts and the verdict."""
    counts = ", ".join(f"{report.count(each)} {each.value}" for each in Verdict)
    yield f"{counts}; {len(report.unresolved)} not followed (--all lists them)"
    yield {
        Verdict.BROKEN: "BROKEN: extraction fails, or would be wrong, on this pair of builds.",
        Verdict.CANNOT_TELL: "CANNOT TELL: something on this pair of builds cannot be judged.",
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


def _table(checks: Iterable[Check], report: Report, colour: bool) -> Iterator[str]:
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if colour else WIDTH
    found_width = max(width - _VERDICT_WIDTH - _PLACE_WIDTH, 30)
    head = ("decision", "call site, and what it needs", "what was found")
    yield f"{head[0]:<{_VERDICT_WIDTH}}{head[1]:<{_PLACE_WIDTH}}{head[2]}"
    yield "-" * (_VERDICT_WIDTH + _PLACE_WIDTH + found_width)
    for check in checks:
        places = [check.call_site.rpartition("/")[2], _tail(check.symbol)]
        left = [part for place in places for part in textwrap.wrap(place, _PLACE_WIDTH - 2)]
        lines = _found_lines(check, report)
        right = [part for line in lines for part in textwrap.wrap(line, found_width)]
        for number, (place, found) in enumerate(zip_longest(left, right, fillvalue="")):
            verdict = f"{check.verdict.value if number == 0 else '':<{_VERDICT_WIDTH}}"
            if colour and number == 0:
                verdict = f"\x1b[{_COLOURS[check.verdict]}m{verdict}\x1b[0m"
            yield f"{verdict}{place:<{_PLACE_WIDTH}}{found}".rstrip()


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


def _wrapped(text: str, indent: str, further: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_long_words=False,
    )
