"""The catalogue of shims, on the command line and in the README."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from eagle3compat.commands.shims import BEGIN, END, catalogue_in, markdown_table, shims
from eagle3compat.errors import InputError
from eagle3compat.shim import all_shims

README = Path(__file__).resolve().parents[2] / "README.md"


def run(*arguments: str) -> str:
    application = typer.Typer()
    application.command()(shims)
    result = CliRunner().invoke(application, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_readme_holds_the_catalogue_that_the_records_make() -> None:
    text = README.read_text(encoding="utf-8")
    begin, end = catalogue_in(text, "README.md")
    assert text[begin:end] == markdown_table(), (
        "README.md and the records of the shims differ; run: eagle3compat shims --write README.md"
    )


def test_every_shim_has_a_line_that_links_its_module() -> None:
    head, rule, *lines = run("--markdown").splitlines()
    assert head.count("|") == rule.count("|") == 11
    for record, line in zip(all_shims(), lines, strict=True):
        assert line.replace("\\|", "").count("|") == 11
        link = line.partition("](")[2].partition(")")[0]
        assert (README.parent / link).is_file()
        assert f"[{record.id}]" in line
        assert f"`{record.consumers}`" in line
        assert ("wrong numbers" in line) is record.silent


def test_without_options_a_table_for_people_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "340")
    printed = run()
    for record in all_shims():
        (line,) = [line for line in printed.splitlines() if f" {record.id} " in f" {line} "]
        assert record.title in line
        assert record.remove_when in line


def test_writing_replaces_what_stands_between_the_marks_alone(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\n| old |\n{END}\nafter — é\n", encoding="utf-8")
    assert "written anew" in run("--write", str(file))
    expected = f"before\n{BEGIN}\n{markdown_table()}{END}\nafter — é\n"
    assert file.read_text(encoding="utf-8") == expected
    assert "as it should be" in run("--write", str(file))
    assert file.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    "text",
    ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", f"{BEGIN}\n{END}{END}"],
)
def test_a_document_without_the_two_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "README.md"
    file.write_text(text)
    with pytest.raises(InputError, match="once each"):
        run("--write", str(file))
    assert file.read_text() == text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.md cannot be read"):
        run("--write", str(tmp_path / "missing.md"))
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.md cannot be read"):
        run("--write", str(tmp_path / "binary.md"))
