"""Folders as an extraction leaves them, of the tiny Kimi-K2.5's states by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.kimi.dataset import combined_digest
from eagle3compat.kimi.extraction import model_digest
from eagle3compat.kimi.manifest import (
    EndRecord,
    ManifestWriter,
    Proof,
    RunRecord,
    SampleRecord,
    input_digest,
    manifest_path,
)
from eagle3compat.kimi.output_head import open_output_head
from eagle3compat.kimi.sample_scan import scan_layer
from eagle3compat.kimi.storage import sample_path
from eagle3compat.reference import ReferenceModel

if TYPE_CHECKING:
    import torch

    from eagle3compat.kimi.audit import AuditReport

LAYERS = (2, 4, 5, 7)
# What the tiny checkpoint of seed 0 itself goes on with greedily, no token twice, after two tokens:
# a text that it models. Some begin alike.
_TEXTS = (
    "3 11 118 248 56 136 264 9 188 249 267 83 292 192 287 44 24 277 8 201 39 369 326 55",
    "5 11 212 123 361 235 94 312 215 181 139 200 264 331 140 117 134",
    "3 12 118 372 335 53 109 59 72 169 258 61 197 371 250 83 107 314 353 293 101 245 156 54",
    "9 12 200 370 190 62 181 139 27 117 363 351 156 42 46 168 109 92 329 138 22 202 367 "
    "39 261 36 55 8 69 337 84 66 254",
    "3 13 249 118 188 371 168 241 201 353 250 83 264 355 53 363 38 170 59 64 191 346 274 "
    "298 314 175 115 61 221 282 109 306 329 37 315 2 51 245 18 120",
    "5 13 381 314 303 107 321 371 324 0 65 122 250 261 121 18 355 64 284",
    "3 14 22 118 264 59 261 175 9 301 36 321 335 292 250 165 258 282 293 188 53 353 83 "
    "248 214 51 226 196 314",
    "9 14 218 107 88 156 202 348 261 66 59 28 110 272 367 147 347 230 307 355 109 117",
)
TEXTS = [list(map(int, text.split())) for text in _TEXTS]


@cache
def reference(model: Path) -> ReferenceModel:
    """The checkpoint, loaded once; one thread is the quickest for a model so small."""
    import torch

    torch.set_num_threads(1)
    return ReferenceModel.load(model)


@cache
def states(model: Path) -> list[list[torch.Tensor]]:
    return reference(model).hidden_states(TEXTS, LAYERS)


def write_samples(model: Path, folder: Path, dtype: str = "float32") -> Path:
    """Sample files alone, as speculators writes them."""
    import torch

    folder.mkdir(parents=True)
    for index, (tokens, layers) in enumerate(zip(TEXTS, states(model), strict=True)):
        sample = {
            "input_ids": torch.tensor(tokens),
            "loss_mask": torch.tensor(_mask(tokens)),
            "hidden_states": [layer.to(getattr(torch, dtype)).clone() for layer in layers],
        }
        torch.save(sample, sample_path(folder, index))
    return folder


def _mask(tokens: Sequence[int]) -> list[int]:
    return [0] * (len(tokens) // 2) + [1] * (len(tokens) - len(tokens) // 2)


def write_extraction(model: Path, folder: Path, dtype: str = "float32", shards: int = 1) -> Path:
    """A whole extraction: sample files, and manifests that prove each of them."""
    samples = write_samples(model, folder / "hidden_states", dtype)
    for shard in range(shards):
        writer = ManifestWriter(manifest_path(folder, (shard, shards)))
        writer.append([run_record(model, dtype, (shard, shards))])
        for index in range(shard, len(TEXTS), shards):
            writer.append([sample_record(model, samples, index)])
        writer.append([EndRecord(0, 1.0, sum(map(len, TEXTS)))])
        writer.close()
    return folder


def run_record(model: Path, dtype: str, shard: tuple[int, int]) -> RunRecord:
    return RunRecord(
        run=0,
        started=1e9,
        builds={"vllm": "vllm 0.16.0", "speculators": "speculators 0.3.0"},
        shims=("layer-order", "request-order"),
        model=str(model),
        model_digest=model_digest(model),
        layers=LAYERS,
        hidden_size=128,
        dtype=dtype,
        data="data.jsonl",
        samples=len(TEXTS),
        data_digest=combined_digest(input_digest(text, _mask(text)) for text in TEXTS),
        shard=shard,
        settings={"max_model_len": 64},
    )


def sample_record(model: Path, samples: Path, index: int) -> SampleRecord:
    path = sample_path(samples, index)
    sample = load(path)
    scans = [scan_layer(layer) for layer in sample["hidden_states"]]
    # What an engine would sample: the reference's own greedy token.
    next_token = int(reference(model).logits([TEXTS[index]])[0][-1].argmax())
    last = sample["hidden_states"][-1][-1:]
    (proof,) = open_output_head(model).judge(last, [next_token])
    tokens = sample["input_ids"].tolist()
    return SampleRecord(
        index=index,
        line=index + 1,
        input_digest=input_digest(tokens, sample["loss_mask"].tolist()),
        tokens=len(tokens),
        bytes=path.stat().st_size,
        layer_norms=tuple(scan.mean_norm for scan in scans),
        checksums=tuple(scan.checksum for scan in scans),
        proof=proof,
        run=0,
        time=1e9 + index,
    )


def rewrite_record(folder: Path, record: SampleRecord, **changes: Any) -> None:
    """Append another word on a sample to the manifest of an unsplit extraction."""
    writer = ManifestWriter(manifest_path(folder, (0, 1)))
    writer.append([replace(record, **changes)])
    writer.close()


def with_token(proof: Proof, token: int) -> Proof:
    return replace(proof, next_token=token)


def load(path: Path) -> dict[str, Any]:
    import torch

    sample: dict[str, Any] = torch.load(path, weights_only=True)
    return sample


def save(path: Path, sample: dict[str, Any]) -> None:
    import torch

    torch.save(sample, path)


def listed(report: AuditReport) -> list[tuple[int | None, str, str]]:
    """What an audit found: sample, kind and words."""
    return [(each.sample, each.kind.value, each.what) for each in report.findings]
