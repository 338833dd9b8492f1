"""`report` writes one page that shows what the manifests say, and needs nothing else."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import call, lay_out_builds, the_error

from eagle3compat.errors import InputError
from eagle3compat.kimi.extraction_figures import ExtractionFigures
from eagle3compat.kimi.manifest import (
    EndRecord,
    ManifestWriter,
    Proof,
    RunRecord,
    SampleRecord,
    manifest_path,
    read_manifests,
)
from eagle3compat.kimi.report_page import ReportSettings, read_acceptance, write_report

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

START = 1_700_000_000.0
HOSTILE = "<script>alert('a')</script> & \"b\""


def run(number: int, shard: tuple[int, int] = (0, 1), started: float = START) -> RunRecord:
    return RunRecord(
        run=number,
        started=started,
        builds={"vllm": f"vllm {HOSTILE}", "speculators": "speculators 0.3.0"},
        shims=("layer-order", "request-order"),
        model="/models/kimi",
        model_digest="0",
        layers=(2, 7),
        hidden_size=128,
        dtype="bfloat16",
        data=f"/data/{HOSTILE}.jsonl",
        samples=10,
        data_digest="0",
        shard=shard,
        settings={"max_model_len": 64},
    )


def sample(index: int, **changes: Any) -> SampleRecord:
    values = {
        "index": index,
        "line": index + 1,
        "input_digest": "0",
        "tokens": 100 * (index + 1),
        "bytes": 1000,
        "layer_norms": (10.0 + index, 300.0),
        "checksums": ("0", "0"),
        "proof": Proof(5, 5, 0.0, 0.1),
        "run": 0,
        "time": START + 60 * (index + 1),
    }
    return SampleRecord(**{**values, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs of one shard: 6 samples done, 2 set aside, 2 still to do."""
    out = tmp_path / "out"
    out.mkdir()
    writer = ManifestWriter(manifest_path(out, (0, 1)))
    writer.append([run(0), *(sample(index) for index in range(4))])
    writer.append([run(1, started=START + 1000)])
    later = {"run": 1, "time": START + 1300}
    failed = {**later, "proof": Proof(1, 2, 0.9, 0.1)}
    writer.append(
        [
            sample(4, **later, proof=Proof(1, 2, 0.05, 0.1)),
            sample(5, **later, proof=None),
            sample(6, **failed, reason=f"its logit is 0.9 lower {HOSTILE}"),
            sample(7, **failed, reason=f"its logit is 0.8 lower {HOSTILE}"),
            EndRecord(1, 250.0, 1100),
        ]
    )
    writer.close()
    return out


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Text and images of a page; a tag that is left open, or closed and never opened, fails."""

    VOID = ("meta", "img", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.images: dict[str, str] = {}
        self.words: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        assert not {"href", "onload", "onerror"} & values.keys()
        if tag == "img":
            self.images[values["alt"]] = values["src"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_the_figures_are_those_of_the_manifests(folder: Path) -> None:
    figures = ExtractionFigures(read_manifests(folder))
    assert [record.index for record in figures.done] == [0, 1, 2, 3, 4, 5]
    assert (figures.whole, figures.tokens, figures.bytes) == (10, 2100, 6000)
    # The first run was stopped: its time is that until its last sample.
    assert figures.seconds == 240 + 250
    assert [each.rate for each in figures.runs] == [None, 1100 / 250]
    assert figures.by_shard() == [("0 of 1", 6, 2, 10)]
    assert figures.norms() == {2: [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], 7: [300.0] * 6}
    rate = figures.rate()
    assert sum(rate.rates) * rate.width == pytest.approx(2100)
    assert len(rate.starts) * rate.width == pytest.approx(1300)
    assert figures.progress()[0][-1] == 1300
    assert figures.progress()[1] == [0, 100, 300, 600, 1000, 1500, 2100]
    proofs = figures.proofs()
    assert (proofs.agreeing, proofs.explained, proofs.failing, proofs.unproved) == (4, 1, 2, 1)
    assert proofs.shares == pytest.approx((0.5, 9.0, 9.0))
    assert proofs.largest == Proof(1, 2, 0.9, 0.1)
    ((reason, count),) = figures.reasons()
    assert count == 2
    assert reason.startswith("its logit is … lower")


def test_a_sample_that_was_done_again_counts_once(folder: Path) -> None:
    writer = ManifestWriter(manifest_path(folder, (0, 1)))
    writer.append([sample(6, run=1, time=START + 1400)])
    writer.close()
    figures = ExtractionFigures(read_manifests(folder))
    assert len(figures.done) == 7
    assert [record.index for record in figures.set_aside] == [7]


def test_shards_add_up_and_a_missing_one_is_seen(tmp_path: Path) -> None:
    for shard in (0, 2):
        writer = ManifestWriter(manifest_path(tmp_path, (shard, 3)))
        writer.append([run(0, (shard, 3)), sample(shard), sample(shard + 3)])
        writer.close()
    figures = ExtractionFigures(read_manifests(tmp_path))
    assert figures.missing_shards == [1]
    assert figures.by_shard() == [("0 of 3", 2, 0, 4), ("2 of 3", 2, 0, 3)]
    assert len(figures.norms()[2]) == 4


def test_the_page_shows_them_and_needs_no_network(folder: Path) -> None:
    page = write_report(ReportSettings(folder))
    assert page == folder / "report.html"
    html = read(page)
    parsed = Page(html)
    assert "6 of 10 samples done" in parsed.text
    assert "2 samples are still to be extracted." in parsed.text
    assert "2,100 tokens" in parsed.text
    assert "speculators 0.3.0" in parsed.text
    assert "layer-order, request-order" in parsed.text
    assert "was stopped" in parsed.text
    for caption in ("Tokens done over time", "Tokens a second over time"):
        assert caption in parsed.images
    # Nothing is fetched: every image is in the page, and none names another place to load from.
    assert not re.search(r"""(src|href)\s*=\s*(?!"data:)""", html)
    for uri in parsed.images.values():
        kind, content = uri.split(",")
        assert kind == "data:image/svg+xml;base64"
        image = base64.b64decode(content).decode()
        assert "<svg" in image
        assert not re.search(r"""(href|src)\s*=\s*["'](?!#|data:)""", image)
        assert "@import" not in image


def test_what_manifests_hold_is_escaped(folder: Path) -> None:
    html = read(write_report(ReportSettings(folder)))
    assert "<script" not in html
    assert HOSTILE in Page(html).text
    assert "script" not in Page(html).tags


def test_proofs_that_are_not_finite_are_counted_and_not_drawn(folder: Path) -> None:
    writer = ManifestWriter(manifest_path(folder, (0, 1)))
    nan = float("nan")
    writer.append([sample(8, proof=Proof(1, 2, nan, nan), layer_norms=(nan, nan), reason="NaN")])
    writer.close()
    proofs = ExtractionFigures(read_manifests(folder)).proofs()
    assert (proofs.failing, len(proofs.shares)) == (3, 3)
    assert proofs.largest == Proof(1, 2, 0.9, 0.1)
    assert (
        "Shortfalls where tokens differ" in Page(read(write_report(ReportSettings(folder)))).images
    )


def test_the_same_manifests_give_the_same_images(folder: Path) -> None:
    first = Page(read(write_report(ReportSettings(folder)))).images
    assert Page(read(write_report(ReportSettings(folder)))).images == first


def test_an_extraction_that_has_only_begun_is_shown(tmp_path: Path) -> None:
    writer = ManifestWriter(manifest_path(tmp_path, (0, 1)))
    writer.append([run(0)])
    writer.close()
    assert "0 of 10 samples done" in Page(read(write_report(ReportSettings(tmp_path)))).text


METRICS = [
    {"kind": "run", "seconds": 0.0},
    {"kind": "validation", "epoch": -1, "step": 0, "loss": 9.0, "accuracy": [0.01, 0.0]},
    {"kind": "train", "epoch": 0, "step": 0, "loss": 8.0, "accuracy": [0.1, 0.0]},
    {"kind": "train", "epoch": 0, "step": 1, "loss": 5.0, "accuracy": [0.2, 0.1]},
    {"kind": "validation", "epoch": 0, "step": 2, "loss": 4.0, "accuracy": [0.5, 0.25]},
    {"kind": "end"},
]


def test_training_and_acceptance_are_shown_when_they_are_named(
    folder: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    lines = [json.dumps({"seconds": 1.0, "learning_rate": None, **line}) for line in METRICS]
    (draft / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({HOSTILE: {"acceptance_length": 2.75}}))
    settings = ReportSettings(folder, tmp_path / "page.html", draft, lengths)
    parsed = Page(read(write_report(settings)))
    assert "2 steps in 1 run" in parsed.text
    assert "it came to its end" in parsed.text
    assert "0 2 4 0.500, 0.250 1.75" in parsed.text
    assert {"Loss over the steps", "Accuracy over the steps", "Acceptance lengths"} <= set(
        parsed.images
    )
    assert f"{HOSTILE} 2.750" in parsed.text


@pytest.mark.parametrize(
    ("content", "lengths"),
    [
        ({"acceptance_length": 2}, {"draft": 2.0}),
        (
            {"trained": {"acceptance_length": 2.5}, "untrained": {"acceptance_length": 1}},
            {"trained": 2.5, "untrained": 1.0},
        ),
        (
            [{"name": "a", "acceptance_length": 2}, {"draft": "b", "acceptance_length": 3}],
            {"a": 2.0, "b": 3.0},
        ),
        (
            {"runs": [{"acceptance_length": 2}, {"acceptance_length": 3}]},
            {"runs 1": 2.0, "runs 2": 3.0},
        ),
    ],
)
def test_acceptance_lengths_are_found_by_what_was_served(
    tmp_path: Path, content: Any, lengths: dict[str, float]
) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(content))
    assert read_acceptance(path) == lengths


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"folder": Path("nowhere")}, "no such folder"),
        ({"folder": Path(__file__).parent}, "holds no manifest"),
        ({"draft": Path(__file__).parent}, "holds no metrics.jsonl"),
        ({"acceptance": Path(__file__)}, "no acceptance lengths"),
        ({"out": Path("/nowhere/page.html")}, "cannot be written"),
    ],
)
def test_bad_input_is_named(folder: Path, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        write_report(ReportSettings(**{"folder": folder, **options}))


def test_the_command_prints_the_page(folder: Path, tmp_path: Path) -> None:
    builds = lay_out_builds(tmp_path / "builds")
    done = call("-m", "eagle3compat", "report", folder, builds=builds)
    assert (done.returncode, done.stdout) == (0, f"{folder / 'report.html'}\n"), done.stderr
    wrong = call("-m", "eagle3compat", "report", tmp_path / "nowhere", builds=builds)
    assert "no such folder" in the_error(wrong)
