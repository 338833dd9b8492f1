"""What the extraction's process and the worker that holds the states tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle3compat.kimi.manifest import Proof


@dataclass(frozen=True)
class StreamSettings:
    """Where and how the worker writes.

    Args:
        unfinished: folder for files whose proof is still to come.
        lock: file that the writing worker locks: one that outlives its parent keeps others out.
        threads: writers.
        cores: for the writers where the states are computed on the CPU, whose own threads vLLM
            binds to a core each: a writer would inherit the first one's.
        slabs: buffers of one step's rows each, which bound the memory of the host.
        tokens_a_step: rows that a step has at most.
        hidden_size: width of one state.
        last_layer: which of the layers asked for is the verifier's last, whose state gives the
            next token; None where it is not asked for.
    """

    unfinished: str
    lock: str
    threads: int
    cores: tuple[int, ...]
    slabs: int
    tokens_a_step: int
    hidden_size: int
    last_layer: int | None


@dataclass(frozen=True)
class Announced:
    """A request that is to be written.

    Args:
        request_id: vLLM's id.
        index: number of the sample.
        loss_mask: a byte a token, 0 or 1.
    """

    request_id: str
    index: int
    loss_mask: bytes


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Args:
        scheduler_output: vLLM's ``SchedulerOutput``.
        chunks: what it computes (`eagle3compat.shims.request_order.Chunk`).
        ending: request ids of the prompts that end in it: the engine samples their next tokens.
    """

    scheduler_output: Any
    chunks: list[Any]
    ending: set[str]


@dataclass(frozen=True)
class Written:
    """A sample whose file is whole, under ``unfinished``.

    Args:
        request_id: vLLM's id.
        index: number of the sample.
        tokens: rows of each layer.
        bytes: size of the file.
        layer_norms: mean Euclidean norm of a row, one a layer.
        checksums: one a layer (`manifest.layer_checksum`).
        fault: what is wrong with the states; None where nothing is.
    """

    request_id: str
    index: int
    tokens: int
    bytes: int
    layer_norms: tuple[float, ...]
    checksums: tuple[str, ...]
    fault: str | None


@dataclass(frozen=True)
class Answer:
    """What the worker says when asked.

    Args:
        written: samples written since the last answer.
        sampled: by request id, the greedy next tokens of prompts of the round before this one.
        proofs: by request id, for the next tokens that came with the question before this.
        failure: why writing cannot go on, once it cannot.
    """

    written: list[Written] = field(default_factory=list)
    sampled: dict[str, int] = field(default_factory=dict)
    proofs: dict[str, Proof] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Opened:
    """What a worker finds when its stream is opened.

    Args:
        dtype: of the states, such as ``"bfloat16"``.
        unprovable: why next tokens cannot be proved on this model; None where they can.
    """

    dtype: str
    unprovable: str | None
