"""The `audit` command: what it prints, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import call, lay_out_builds, the_error

from eagle3compat.commands.audit import MOST_SHOWN, show
from eagle3compat.kimi.audit import AuditReport
from eagle3compat.kimi.findings import Finding, Kind, layers_in_words, ranges, rows_in_words


def finding(index: int, what: str = "layers 4 and 7 are exchanged") -> Finding:
    return Finding(Kind.LAYERS, f"hidden_states/data_{index}.pt", what, index)


def report(findings: list[Finding]) -> AuditReport:
    return AuditReport(
        Path("out"),
        recorded=True,
        samples=3,
        tokens=40,
        bytes=5000,
        findings=findings,
        checked=["a sentence that is rather long " * 6],
        not_checked=["nothing"],
        notes=["several builds"],
        again_worst={4: (0.5, 0.05)},
    )


def test_everything_fits_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show(report([finding(123456, "layer 4: rows 1 and 2 are exchanged " * 12)]))
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 100
    for part in ("data_123456.pt", "not checked  nothing", "note         several builds"):
        assert part in output
    assert "layer 4: largest relative error 0.5, rounding explains 0.05" in output
    assert output.endswith("found 1 fault\n")


def test_a_square_bracket_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show(report([finding(1, "shape [4, 5], expected [/6]")]))
    assert "shape [4, 5], expected [/6]" in capsys.readouterr().out


def test_a_long_list_is_cut_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    show(report([finding(index) for index in range(MOST_SHOWN + 7)]))
    output = capsys.readouterr().out
    assert output.count("are exchanged") == MOST_SHOWN
    assert "and 7 more; --json gives them all" in output


def test_all_right_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show(report([]))
    assert capsys.readouterr().out.endswith("all right\n")


def test_numbers_are_written_as_ranges() -> None:
    assert ranges([3]) == "3"
    assert ranges([5, 1, 2, 3, 9]) == "1-3, 5, 9"
    assert ranges(range(0, 20, 2)) == "0, 2, 4, 6 and 6 more"
    assert rows_in_words([4]) == "row 4"
    assert rows_in_words([4, 5]) == "rows 4-5"
    assert layers_in_words([4], [4]) == "layer 4"
    assert layers_in_words([2, 4], [2, 4]) == "every layer"
    assert layers_in_words([2, 4], [2, 4, 5]) == "layers 2, 4"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["."], "holds no manifest and no data_"),
        (["--again", "2", "."], "--again"),
        (["--count", "-1", "."], "--count"),
        (["--layers", "2,x", "."], "expected integers"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], fault: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "here").mkdir()
    builds = lay_out_builds(tmp_path / "builds")
    command = ("-m", "eagle3compat", "audit", *arguments)
    assert fault in the_error(call(*command, builds=builds, folder=tmp_path / "here"))


def test_exit_codes_and_json(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    builds = lay_out_builds(tmp_path / "builds")
    (tmp_path / "out").mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(2):
        tokens = torch.arange(9) + 20 * index
        states = [torch.randn(9, 8, generator=generator) for _ in range(2)]
        content = {"input_ids": tokens, "loss_mask": tokens * 0 + 1, "hidden_states": states}
        torch.save(content, tmp_path / "out" / f"data_{index}.pt")
    command = ("-m", "eagle3compat", "audit", "out", "--json")
    right = call(*command, builds=builds, folder=tmp_path)
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["right"] is True
    (tmp_path / "out" / "data_1.pt").write_bytes(b"")
    wrong = call(*command, builds=builds, folder=tmp_path)
    assert wrong.returncode == 1, wrong.stderr
    assert [each["sample"] for each in json.loads(wrong.stdout)["findings"]] == [1]
