"""What conditional decisions turned out to be, for the latest engine: here and in its workers."""

from __future__ import annotations

_settled: dict[str, str] = {}


def settle(shim_id: str, choice: str) -> None:
    """Note what a conditional shim chose, and on what ground."""
    _settled[shim_id] = choice


def choices() -> dict[str, str]:
    """Every choice made in this process, or heard from workers, by shim id."""
    return dict(_settled)


def forget() -> None:
    """Drop all notes."""
    _settled.clear()
