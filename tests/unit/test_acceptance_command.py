"""``eagle3compat acceptance`` as a user calls it, up to where an engine would start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import call, lay_out_builds, the_error
from handmade_draft import write_draft

from eagle3compat.commands.acceptance import acceptance_table, write_acceptance
from eagle3compat.errors import InputError
from eagle3compat.kimi.report_page import read_acceptance
from eagle3compat.kimi.serving import Acceptance
from eagle3compat.tiny import write_tiny_kimi

pytest.importorskip("numpy")


def figures(name: str, accepted_at: tuple[int, ...]) -> Acceptance:
    return Acceptance(
        name=name,
        draft=Path(name),
        layer_ids=(3, 5, 6),
        vllm="0.32.0",
        drafts=10,
        draft_tokens=30,
        accepted_tokens=sum(accepted_at),
        accepted_at=accepted_at,
        texts=((1,) * 40,),
        start_seconds=60.0,
        seconds=2.0,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lay_out_builds(tmp_path)
    write_tiny_kimi(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    return tmp_path


def error_of(folder: Path, *arguments: str) -> str:
    given = ("--model", "model", "--prompts", "prompts.jsonl", *arguments)
    return the_error(call("-m", "eagle3compat", "acceptance", *given, builds=folder, folder=folder))


def test_a_draft_without_layer_ids_is_one_line_and_exit_2(folder: Path) -> None:
    write_draft(folder / "draft", eagle_aux_hidden_state_layer_ids=None)
    assert "has no eagle_aux_hidden_state_layer_ids" in error_of(folder, "--draft", "draft")


def test_an_environment_without_vllm_is_one_line_and_exit_2(folder: Path) -> None:
    write_draft(folder / "draft")
    error = error_of(folder, "--draft", "draft", "--serving-python", "no/python")
    assert "--serving-python no/python: expected a Python interpreter" in error


def test_prompts_of_another_tokenizer_are_one_line_and_exit_2(folder: Path) -> None:
    write_draft(folder / "draft")
    (folder / "prompts.jsonl").write_text('{"input_ids": [1, 100000]}\n')
    assert "prompts.jsonl:1" in error_of(folder, "--draft", "draft")


def test_the_table_shows_drafts_side_by_side() -> None:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        console.print(acceptance_table([figures("trained", (9, 8, 6)), figures("old", (1, 0, 0))]))
    rows = [line.split() for line in capture.get().splitlines() if line.split()]
    assert rows[-2] == ["trained", "3,", "5,", "6", "3.300", "0.900", "0.800", "0.600", "10", "20"]
    assert rows[-1] == ["old", "3,", "5,", "6", "1.100", "0.100", "0.000", "0.000", "10", "20"]


def test_what_is_written_is_what_the_report_reads(tmp_path: Path) -> None:
    measured = [figures("trained", (9, 8, 6)), figures("untrained", (0, 0, 0))]
    write_acceptance(measured, tmp_path / "acceptance.json")
    assert read_acceptance(tmp_path / "acceptance.json") == {"trained": 3.3, "untrained": 1.0}
    assert len(json.loads((tmp_path / "acceptance.json").read_text())) == 2


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_acceptance([figures("trained", (9, 8, 6))], tmp_path / "no" / "acceptance.json")
