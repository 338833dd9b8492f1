"""From conversations to samples of token ids and loss masks, with an account of every row."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import eagle3compat
from eagle3compat.errors import InputError
from eagle3compat.kimi.conversation_rows import Place, Row, Rows, open_rows
from eagle3compat.kimi.prepared_folder import PreparedFolder, claim_prepared_folder
from eagle3compat.kimi.row_preparer import Chunk, RowPreparer, RowSettings, Tally
from eagle3compat.kimi.verifier import read_verifier

ROWS_A_PART = 10_000
ROWS_A_CHUNK = 32
"""Rows that a process is given at once."""
CHUNKS_AHEAD = 3
"""Chunks of each process that wait or are done, which bounds the memory."""
BYTES_THAT_PAY = 64 << 20
"""Below this size of a data file the start of further processes costs more than they save."""
MOST_PROCESSES = 16

TOKENIZER_FILES = ("*token*", "*.jinja", "*chat_template*", "*.model", "vocab*", "merges*")


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        data: a ``.jsonl`` file, or what ``datasets`` loads.
        out: the folder to write.
        rows: how rows become samples.
        configuration: of a data set.
        split: of a data set.
        processes: how many; None for as many as pay.
        rows_a_part: rows of the data set that one part is made from.
    """

    data: str
    out: Path
    rows: RowSettings
    configuration: str | None = None
    split: str = "train"
    processes: int | None = None
    rows_a_part: int = ROWS_A_PART


@dataclass(frozen=True)
class Progress:
    """How far a preparation is: figures so far, bytes or rows behind, and of how many, if known."""

    rows: int
    samples: int
    done: int
    size: int | None
    unit: str


@dataclass(frozen=True)
class Account:
    """What was done.

    Attributes:
        request: what was asked for.
        tally: the figures of all rows.
        remarks: the first of the rows that were dropped or cut.
        route: why speculators' preprocessing was asked, or not.
        seconds: that this run took.
        resumed: parts that an earlier run had done.
    """

    request: Request
    tally: Tally
    remarks: list[dict[str, Any]]
    route: str
    seconds: float
    resumed: int


def prepare_data(request: Request, advance: Callable[[Progress], None]) -> Account:
    """Make samples of a data set; a run that was stopped is gone on with.

    Args:
        request: what the user asks for.
        advance: called as the work goes on.

    Raises:
        InputError: nothing can be read, the folder holds something else, or no row makes a sample.
    """
    start = time.monotonic()
    verifier = read_verifier(request.rows.model, needs_weights=False)
    verifier.check_max_model_len(request.rows.max_model_len)
    rows = open_rows(request.data, request.configuration, request.split)
    about = _about(request, rows)
    with claim_prepared_folder(request.out, about) as folder:
        resumed = folder.parts
        if not folder.is_finished:
            _write_parts(request, rows, folder, advance)
            _refuse_nothing(request, folder)
            folder.finish(verifier.vocab_size, about)
    seconds = time.monotonic() - start
    return Account(request, folder.tally, folder.remarks, folder.route, seconds, resumed)


def _about(request: Request, rows: Rows) -> dict[str, Any]:
    """All that decides what is written."""
    return {
        "data": rows.identity(),
        "tokenizer": _tokenizer_digest(request.rows.model),
        "max_model_len": request.rows.max_model_len,
        "truncate": request.rows.truncate,
        "ask_speculators": request.rows.ask_speculators,
        "rows_a_part": request.rows_a_part,
        "builds": {
            "eagle3compat": eagle3compat.__version__,
            **{name: _version(name) for name in ("transformers", "speculators")},
        },
    }


def _tokenizer_digest(model: Path) -> str:
    """Of the files that a tokenizer and its chat template are made from."""
    hashed = blake2b(digest_size=16)
    for path in sorted({path for pattern in TOKENIZER_FILES for path in model.glob(pattern)}):
        if path.is_file():
            hashed.update(path.name.encode() + blake2b(path.read_bytes()).digest())
    return hashed.hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _refuse_nothing(request: Request, folder: PreparedFolder) -> None:
    if folder.tally.samples:
        return
    reasons = "; ".join(f"{each['source']}: {each['reason']}" for each in folder.remarks)
    read = folder.tally.rows
    folder.clear()
    raise InputError(
        f"--data {request.data}: none of {read} rows makes a sample"
        + (f" (first: {reasons})" if reasons else "")
    )


def _write_parts(
    request: Request, rows: Rows, folder: PreparedFolder, advance: Callable[[Progress], None]
) -> None:
    chunks = _chunks(rows.read(folder.after))
    with _preparing(request.rows, _process_count(request, rows)) as prepare:
        prepared = prepare(chunks)
        more = True
        while more:
            before = folder.tally
            with folder.part() as part:
                more = False
                for chunk, after in prepared:
                    part.add(chunk, after)
                    done_rows = before.rows + part.tally.rows
                    done_samples = before.samples + part.tally.samples
                    advance(Progress(done_rows, done_samples, after.offset, rows.size, rows.unit))
                    if part.tally.rows >= request.rows_a_part:
                        more = True
                        break


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, ROWS_A_CHUNK)):
        yield chunk


def _process_count(request: Request, rows: Rows) -> int:
    if request.processes is not None:
        return request.processes
    if rows.unit != "bytes" or rows.size is None or rows.size < BYTES_THAT_PAY:
        return 1
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


_Prepared = Iterator[tuple[Chunk, Place]]


@contextmanager
def _preparing(
    settings: RowSettings, processes: int
) -> Iterator[Callable[[Iterable[list[Row]]], _Prepared]]:
    """Something that prepares chunks in their order, in this process or in several."""
    if processes == 1:
        preparer = RowPreparer(settings)
        yield lambda chunks: ((preparer.prepare(each), each[-1].after) for each in chunks)
        return
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_start_worker, initargs=(settings,)
    ) as pool:
        try:
            yield lambda chunks: _in_order(pool, chunks, CHUNKS_AHEAD * processes)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterable[list[Row]], ahead: int) -> _Prepared:
    waiting: deque[tuple[Future[Chunk], Place]] = deque()
    for chunk in chunks:
        waiting.append((pool.submit(_prepare_in_worker, chunk), chunk[-1].after))
        if len(waiting) >= ahead:
            future, after = waiting.popleft()
            yield future.result(), after
    for future, after in waiting:
        yield future.result(), after


_workers_preparer: RowPreparer | None = None


def _start_worker(settings: RowSettings) -> None:
    global _workers_preparer
    _workers_preparer = RowPreparer(settings)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A parent that was killed closes nothing that its workers wait for.
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _prepare_in_worker(rows: list[Row]) -> Chunk:
    assert _workers_preparer is not None
    return _workers_preparer.prepare(rows)
