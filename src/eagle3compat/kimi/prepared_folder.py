"""The folder that ``prepare`` writes, part by part, so that a stopped run can be gone on with.

::

    part-00000.jsonl, …      samples, one JSON object a line: input_ids, loss_mask, source, turns
    token_frequencies.json   how often each token is to be predicted, with the samples' digest
    dropped.jsonl            every row that was dropped or cut, with the reason
    account.json             the figures; written last, so that a folder with it is complete
    preparation.json         what was asked for: another request for this folder is refused
    unfinished/              work in progress, gone at the end

A part is done once its account is in ``unfinished``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from eagle3compat.errors import InputError
from eagle3compat.kimi.conversation_rows import Place
from eagle3compat.kimi.dataset import ACCOUNT_FILE, PART_PATTERN
from eagle3compat.kimi.frequencies import FREQUENCY_FILE, TokenFrequencies, write_frequencies
from eagle3compat.kimi.row_preparer import Chunk, Tally
from eagle3compat.kimi.storage import try_lock, write_whole

REQUEST_FILE = "preparation.json"
DROPPED_FILE = "dropped.jsonl"
UNFINISHED = "unfinished"
FEW = 5
"""Remarks on rows that are shown; all of them are in `DROPPED_FILE`."""


class PartWriter:
    """One part while it is written.

    Attributes:
        tally: the figures of its rows.
        after: where reading goes on behind them.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.tally = Tally()
        self.after = Place()
        self.remarks: list[dict[str, Any]] = []
        self.route = ""

    def add(self, chunk: Chunk, after: Place) -> None:
        """Append what came of some rows."""
        self._stream.write(chunk.lines)
        self.tally.add(chunk.tally)
        self.remarks += chunk.remarks
        self.route, self.after = chunk.route, after


class PreparedFolder:
    """A folder that this process alone writes, from `claim_prepared_folder`.

    Attributes:
        parts: parts that are done.
        tally: the figures of their rows.
        after: where reading goes on behind them.
        remarks: the first of their remarks.
        route: why speculators' preprocessing was asked, or not.
        is_finished: whether there is nothing left to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = 0
        self.tally = Tally()
        self.after = Place()
        self.remarks: list[dict[str, Any]] = []
        self.route = ""
        self.is_finished = (path / ACCOUNT_FILE).is_file()
        if self.is_finished:
            self._read_account()
        else:
            (path / UNFINISHED).mkdir(exist_ok=True)
            while (account := self._account_of(self.parts)).is_file():
                self._take(json.loads(account.read_text(encoding="utf-8")))

    @contextmanager
    def part(self) -> Iterator[PartWriter]:
        """Write the next part; it counts once the block is left without an error."""
        name = _part_name(self.parts)
        unfinished = self.path / UNFINISHED / name
        with unfinished.open("wb") as stream:
            writer = PartWriter(stream)
            yield writer
            stream.flush()
            os.fsync(stream.fileno())
        if not writer.tally.rows:
            unfinished.unlink()
            return
        unfinished.replace(self.path / name)
        account = {
            "tally": writer.tally.to_json(),
            "after": vars(writer.after),
            "remarks": writer.remarks,
            "route": writer.route,
        }
        _write_json(self._account_of(self.parts), account)
        self._take(account)

    def finish(self, vocab_size: int, about: dict[str, Any]) -> None:
        """Write what belongs to the whole, the account last.

        Args:
            vocab_size: of the verifier.
            about: what else the account is to say.
        """
        frequencies = TokenFrequencies(self.tally.frequencies, self.tally.digest, vocab_size)
        write_frequencies(self.path / FREQUENCY_FILE, frequencies)
        write_whole(self.path / DROPPED_FILE, self._write_remarks)
        figures = {key: each for key, each in self.tally.to_json().items() if key != "frequencies"}
        account = {**about, **figures, "parts": self.parts, "route": self.route}
        _write_json(self.path / ACCOUNT_FILE, {**account, "remarks": self.remarks})
        shutil.rmtree(self.path / UNFINISHED)
        self.is_finished = True

    def clear(self) -> None:
        """Take away all that was written, since nothing came of it."""
        for number in range(self.parts):
            (self.path / _part_name(number)).unlink()
        shutil.rmtree(self.path / UNFINISHED)
        (self.path / REQUEST_FILE).unlink()

    def _take(self, account: dict[str, Any]) -> None:
        self.parts += 1
        self.tally.add(Tally.from_json(account["tally"]))
        self.after = Place(**account["after"])
        self.remarks = (self.remarks + account["remarks"])[:FEW]
        self.route = account["route"]

    def _read_account(self) -> None:
        account = json.loads((self.path / ACCOUNT_FILE).read_text(encoding="utf-8"))
        names = Tally().to_json().keys() - {"frequencies"}
        figures = {name: account[name] for name in names}
        self.tally = Tally.from_json({**figures, "frequencies": {}})
        self.parts, self.route = account["parts"], account["route"]
        self.remarks = account["remarks"]
        # A run may have been stopped between the account and this.
        shutil.rmtree(self.path / UNFINISHED, ignore_errors=True)

    def _write_remarks(self, stream: BinaryIO) -> None:
        for number in range(self.parts):
            account = json.loads(self._account_of(number).read_text(encoding="utf-8"))
            for remark in account["remarks"]:
                stream.write(json.dumps(remark, ensure_ascii=False).encode() + b"\n")

    def _account_of(self, number: int) -> Path:
        return self.path / UNFINISHED / f"{_part_name(number)}.account"


@contextmanager
def claim_prepared_folder(path: Path, request: dict[str, Any]) -> Iterator[PreparedFolder]:
    """Take a folder for this process alone: a new or empty one, or one of the same request.

    Args:
        path: the folder; it is made if missing.
        request: all that decides what is written, for JSON.

    Raises:
        InputError: it holds something else, another process writes it, or it cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _refuse_foreign(path, request)
            _write_json(path / REQUEST_FILE, request)
            yield PreparedFolder(path)
    except OSError as error:
        raise InputError(f"--out {path}: cannot be used ({error})") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            raise InputError(f"--out {path}: another prepare is writing it; wait for its end")
        yield
    finally:
        os.close(descriptor)


def _refuse_foreign(path: Path, request: dict[str, Any]) -> None:
    if not (path / REQUEST_FILE).is_file():
        first = min((entry.name for entry in path.iterdir()), default=None)
        if first is not None:
            raise InputError(
                f"--out {path}: is in use (holds {first}, but no {REQUEST_FILE}); give a new or "
                "empty folder"
            )
        return
    if not any(path.glob(PART_PATTERN)):
        return
    there = json.loads((path / REQUEST_FILE).read_text(encoding="utf-8"))
    here = json.loads(json.dumps(request))
    different = sorted(key for key in {*there, *here} if there.get(key) != here.get(key))
    if different:
        what = "; ".join(f"{key}: {there.get(key)!r}, now {here.get(key)!r}" for key in different)
        raise InputError(
            f"--out {path}: holds what another request made ({what}); give a new folder"
        )


def _part_name(number: int) -> str:
    return f"part-{number:05}.jsonl"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_whole(path, lambda stream: stream.write(text.encode() + b"\n"))
