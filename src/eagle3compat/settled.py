"""What conditional decisions turned out to be in this process, for status and handshake."""

from __future__ import annotations

_settled: dict[str, str] = {}


def settle(shim_id: str, choice: str) -> None:
    """Note what a conditional shim chose, and on what ground."""
    _settled[shim_id] = choice


def choices() -> dict[str, str]:
    """Every choice made in this process, by shim id."""
    return dict(_settled)


def forget() -> None:
    """Drop all notes."""
    _settled.clear()
