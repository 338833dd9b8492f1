"""A bug report has what a maintainer asks for, and nothing private."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3compat.bug_report import without_secrets, write_bug_report
from eagle3compat.errors import InputError

LOG = """
Traceback (most recent call last):
  File "early.py", line 1
ValueError: an earlier one
later on
Traceback (most recent call last):
  File "/home/somebody/model.py", line 7
TypeError: unexpected keyword 'eos_token_id' with token=abcdefgh
"""


def test_the_report_holds_builds_environment_and_the_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_API_KEY", "hidden-key-value")
    monkeypatch.setenv("AWS_SECRET", "hidden-secret-value")
    log = tmp_path / "run.log"
    log.write_text(LOG)
    text = write_bug_report(tmp_path / "report.md", log).read_text()
    for wanted in ("## Builds", "speculators", "VLLM_TARGET_DEVICE=cpu", "eos_token_id"):
        assert wanted in text
    for private in (
        "hidden-key-value",
        "hidden-secret-value",
        "somebody",
        "abcdefgh",
        "earlier one",
    ):
        assert private not in text


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("/home/ann/models/kimi", "ann"),
        ("HF hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
        ("Authorization: Bearer abc.def", "abc.def"),
        ("https://me:pass@host/index", "me:pass"),
        ("mail ann@example.org", "ann@example.org"),
    ],
)
def test_private_things_are_left_out(text: str, private: str) -> None:
    assert private not in without_secrets(text)


def test_the_users_home_and_name_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/people/ann-lee")
    monkeypatch.setenv("USER", "ann-lee")
    assert without_secrets("/data/people/ann-lee/x by ann-lee") == "~/x by <name>"


def test_a_file_that_cannot_be_written_or_read_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_bug_report(tmp_path / "no" / "folder" / "report.md")
    with pytest.raises(InputError, match="cannot be read"):
        write_bug_report(tmp_path / "report.md", tmp_path / "gone.log")
