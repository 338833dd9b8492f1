"""Each shim left out in turn, on a real engine: what goes wrong then.

``python left_out.py CASE CHECKPOINT OUT.json`` runs one case in this process; the cases are the
table ``CASES``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3compat.suite import MAX_MODEL_LEN, Call, hard_calls, open_generator, run_suite

LAYERS = (7, 5, 4, 2)
SHORT = hard_calls()[3]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is seen when shims are left out.

    Args:
        left_out: their ids.
        sees: given the checkpoint, what happens in words; see the functions below.
        expected: text that the words hold then.
        otherwise: text that the words hold when nothing is left out.
        text_only: on the language model alone, not below Kimi's wrapper.
        needs_engine: a worker has to start before anything is seen.
    """

    left_out: tuple[str, ...]
    sees: Callable[[Path], str]
    expected: str
    otherwise: str = "right"
    text_only: bool = False
    needs_engine: bool = True


def whole_suite(model: Path) -> str:
    """The first call that is not right."""
    return _first_fault(run_suite(model, layers=LAYERS).calls)


def long_sequence(model: Path) -> str:
    """One sequence longer than a step's budget."""
    return _first_fault(run_suite(model, hard_calls()[2:3], layers=LAYERS).calls)


def over_long_prompt(model: Path) -> str:
    """A prompt longer than the engine's limit."""
    call = Call("over-long", (tuple(range(MAX_MODEL_LEN // 2)) * 3,))
    return _first_fault(run_suite(model, [call], layers=LAYERS).calls)


def repeated_layer(model: Path) -> str:
    """A layer asked for twice."""
    return _first_fault(run_suite(model, [SHORT], layers=(7, 2, 2, 5)).calls)


def half_precision(model: Path) -> str:
    """States in float16, as multiples of those in float32 (median of what is a number)."""
    import torch

    from eagle3compat.reference import reference_hidden_states

    try:
        generator = open_generator(model, LAYERS, dtype="float16")
    except Exception as error:  # noqa: BLE001 (what is raised is the result)
        return str(error)
    try:
        results = generator.generate([list(prompt) for prompt in SHORT.prompts])
    finally:
        generator.executor.shutdown()
    expected = reference_hidden_states(model, SHORT.prompts, LAYERS)
    ratios = [
        (found.float() / wanted).flatten()
        for result, layers in zip(results, expected, strict=True)
        for found, wanted in zip(result["hidden_states"], layers, strict=True)
    ]
    return f"multiples of {torch.cat(ratios).nanmedian():.2f}"


def requests_kept(model: Path) -> str:
    """Requests that the worker still holds after three calls of one prompt each."""
    generator = open_generator(model, LAYERS)
    try:
        for prompt in SHORT.prompts[:3]:
            generator.generate([list(prompt)])
        (held,) = generator.executor.collective_rpc(_count_requests)
    finally:
        generator.executor.shutdown()
    return f"{held} held"


def _count_requests(worker: Any) -> int:
    return len(worker.model_runner.requests)


def _first_fault(calls: Any) -> str:
    for call in calls:
        if call.result != "right":
            return f"{call.result}: {call.detail} ({call.worst:.1e})"
    return "right"


CASES = {
    "tokenizer": Case(
        ("tokenizer-remote-code",), whole_suite, "contains custom code", needs_engine=False
    ),
    "encoder-decoder": Case(
        ("encoder-decoder-field",),
        whole_suite,
        "validation error for SchedulerConfig",
        needs_engine=False,
    ),
    "kv cache groups": Case(("kv-cache-groups",), whole_suite, "'kv_cache_specs'"),
    "block size": Case(("scheduler-block-size",), whole_suite, "'block_size'"),
    "memory": Case(("memory-query",), whole_suite, "NVIDIA"),
    "wrapper": Case(("decoder-layers",), whole_suite, "does not support hidden state extraction"),
    "embeddings": Case(("model-forward",), whole_suite, "'get_input_embeddings'", text_only=True),
    "unique reply": Case(("unique-reply",), whole_suite, "Boolean value of Tensor"),
    "two phases": Case(("two-phase-step",), whole_suite, "sample_tokens() must be called"),
    "block hashes": Case(("prefix-caching",), whole_suite, "raised"),
    "order of requests": Case(("request-order",), whole_suite, "results"),
    "first chunk, caught by the proof of rows": Case(
        ("chunked-prefill",), long_sequence, "Nothing of this call is returned"
    ),
    "first chunk, silent": Case(("chunked-prefill", "request-order"), long_sequence, "wrong"),
    "order of layers": Case(("layer-order",), whole_suite, "layers in ascending order"),
    "rotary": Case(("cpu-rotary",), whole_suite, "wrong"),
    "cut prompts": Case(("whole-prompts",), over_long_prompt, "wrong", "InputError"),
    "repeated layers": Case(
        ("repeated-layers", "layer-order"), repeated_layer, "wrong", "repeats 2"
    ),
    "float16": Case(("float16-scaling",), half_precision, "multiples of 0.", "found float16"),
    "finished requests": Case(("finished-requests",), requests_kept, "3 held", "1 held"),
}

# Shims that 0.16.0 needs and whose absence shows elsewhere alone.
NOT_SEEN_HERE = {
    "async-scheduling": "vLLM's CPU platform turns asynchronous scheduling off by itself",
    "cpu-norm": "0.12 and 0.13 have the kernel that is wrong; text cannot tell which was compiled",
    "current-config": "0.14 and 0.20 to 0.24 have layers that ask for the config in a step",
}


def main(name: str, model: str, out: str) -> None:
    import eagle3compat

    eagle3compat.apply()
    try:
        seen = CASES[name].sees(Path(model))
    except Exception as error:  # noqa: BLE001 (what is raised is the result)
        seen = f"raised: {type(error).__name__}: {error}"
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
