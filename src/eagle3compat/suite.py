"""The batches on which extraction goes wrong, run through a real engine and compared.

One engine, many calls: more requests than the generator schedules at once, batches and single
sequences beyond a step's token budget, shared prefixes, one-token prompts among long ones, the same
call twice, layers asked for in descending order, and a KV cache so small that requests have to
wait. Every state is compared with transformers in float32. The matrix, the engine tests and
``verify-patches --level smoke`` run the calls that are defined here, and nothing else.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.reference import TOLERANCE, ReferenceModel, relative_error
from eagle3compat.shim import Stage, shim

if TYPE_CHECKING:
    from torch import Tensor

    States = Sequence[Sequence[Tensor]]

MAX_MODEL_LEN = 256
TOKEN_BUDGET = 128
"""Tokens of one step."""
KV_CACHE_BLOCKS = 24
"""Holds the longest prompt at 16 tokens a block, and far fewer than 32 prompts."""
PLAIN_TOKENS = 256
"""Token ids below it are ordinary in every tiny checkpoint."""

CONTROLLED = 8
"""Samples that are compared with another model."""

RIGHT, WRONG, MISORDERED, RAISED = "right", "wrong", "misordered", "raised"


@dataclass(frozen=True)
class Call:
    """One call of ``generate``.

    Args:
        name: what makes it hard.
        prompts: token ids of each prompt.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CallOutcome:
    """What one call gave.

    Args:
        name: of the call.
        result: ``right``; ``wrong``; ``misordered``, where every state is right for another prompt
            or layer; or ``raised``.
        worst: the largest relative error against transformers; infinite where nothing compares.
        detail: what was raised, or how the results are ordered.
    """

    name: str
    result: str
    worst: float
    detail: str = ""


@dataclass(frozen=True)
class SuiteOutcome:
    """What the whole suite gave on one pair of builds.

    Args:
        calls: one entry a call, in order. A call that raises ends the suite, since what an engine
            does after an error is nobody's promise.
        control: the smallest relative error of a sample against another model's states; the
            comparison can fail only when it is large.
        layers: the layer ids asked for, in that order.
        shims: ids of the shims that were applied; those for training alone are left out.
        settled: what conditional shims chose in the parent and in the workers.
        seconds: wall clock of the engine's start and of all calls.
        runner: dotted name of the workers' model runner; empty where no engine started.
    """

    calls: tuple[CallOutcome, ...]
    control: float
    layers: tuple[int, ...]
    shims: tuple[str, ...]
    settled: dict[str, str]
    seconds: float
    runner: str = ""

    @property
    def worst(self) -> float:
        """The largest relative error of all calls."""
        return max((call.worst for call in self.calls), default=math.inf)

    @property
    def right(self) -> bool:
        """Whether every call is right, and the comparison could have failed."""
        return (
            bool(self.calls)
            and all(call.result == RIGHT for call in self.calls)
            and self.control > 100 * TOLERANCE
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"right": self.right, "worst": self.worst, **asdict(self)}


def hard_calls(seed: int = 0) -> tuple[Call, ...]:
    """The whole suite, the same for the same seed."""
    draw = random.Random(seed)
    singles = [(token,) for token in draw.sample(range(PLAIN_TOKENS), 12)]
    prefix = _prompt(draw, 64)
    mixed = [
        *(_prompt(draw, draw.choice((3, 17, 40, 90))) for _ in range(22)),
        *singles[:10],
        *(prefix + _prompt(draw, 20) for _ in range(6)),
        _prompt(draw, 200),
        (20,) * 120,
    ]
    draw.shuffle(mixed)
    longer = _prompt(draw, TOKEN_BUDGET + 100)
    forty = Call("40 requests, of which 32 fit the batch", tuple(mixed))
    # What is easier comes first: without repairs it shows how far one gets.
    return (
        Call("one token alone", (singles[0],)),
        Call("12 requests", tuple(_prompt(draw, 5 + index) for index in range(12))),
        Call(
            "shared prefixes of 64 tokens",
            tuple(prefix + _prompt(draw, 8 * index) for index in range(8)),
        ),
        Call("one-token prompts round a long one", (singles[10], longer[::-1], singles[11])),
        Call("one sequence longer than a step's budget", (longer,)),
        Call("the longest prompt there may be", (_prompt(draw, MAX_MODEL_LEN - 1),)),
        forty,
        Call("the same call again", forty.prompts),
    )


def smoke_calls() -> tuple[Call, ...]:
    """A few of the hard calls, for a check that takes seconds beside the engine's start."""
    calls = hard_calls()
    return (calls[1], calls[4], calls[6])


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(PLAIN_TOKENS) for _ in range(length))


def run_suite(
    model: Path,
    calls: Sequence[Call] = (),
    *,
    control: Path | None = None,
    layers: Sequence[int] | None = None,
) -> SuiteOutcome:
    """Start speculators' generator on a checkpoint, make the calls, compare all states.

    ``eagle3compat.apply()`` is the caller's business: without it, this shows what the builds give
    by themselves.

    Args:
        model: a checkpoint folder that `reference` can load, with at least 256 plain tokens.
        calls: what to run; the whole suite when empty.
        control: a checkpoint of the same shape with other weights, whose states must differ.
        layers: layer ids; every layer in descending order when not given.
    """
    from eagle3compat import applying

    wanted = ReferenceModel.load(model)
    asked = tuple(layers or reversed(range(len(wanted.layers))))
    other = ReferenceModel.load(control) if control is not None else None
    start = time.monotonic()
    outcomes: list[CallOutcome] = []
    difference = math.inf
    runner = ""
    try:
        generator = open_generator(model, asked)
    except Exception as error:  # noqa: BLE001 (what is raised is the result)
        traceback.print_exc()
        outcomes.append(CallOutcome("engine start", RAISED, math.inf, _one_line(error)))
    else:
        try:
            runner = generator.executor.collective_rpc(model_runner_name)[0]
            for call in calls or hard_calls():
                outcome, found = _make(generator, call, wanted, asked)
                outcomes.append(outcome)
                if found is None:
                    break
                if other is not None and len(found) >= CONTROLLED and difference == math.inf:
                    few = call.prompts[:CONTROLLED]
                    difference = _smallest(found[: len(few)], other.hidden_states(few, asked))
        finally:
            generator.executor.shutdown()
    status = applying.status()
    return SuiteOutcome(
        tuple(outcomes),
        difference,
        asked,
        tuple(name for name in status.shims if Stage.EXTRACTION in shim(name).stages),
        dict(status.settled),
        time.monotonic() - start,
        runner,
    )


def model_runner_name(worker: Any) -> str:
    """Dotted name of a worker's model runner; sent to the worker, and run there."""
    runner = type(worker.model_runner)
    return f"{runner.__module__}.{runner.__qualname__}"


def open_generator(model: Path, layers: Sequence[int], *, dtype: str = "float32") -> Any:
    """Speculators' own generator, with a small token budget and a small KV cache.

    Args:
        model: a checkpoint folder.
        layers: layer ids.
        dtype: of weights and states, as vLLM names it.
    """
    from speculators.data_generation import vllm_hidden_states_generator as module

    from eagle3compat.kimi.extraction import config_values

    overrides: dict[str, dict[str, Any]] = {
        "ModelConfig": {"dtype": dtype},
        "CacheConfig": {"num_gpu_blocks_override": KV_CACHE_BLOCKS},
        "SchedulerConfig": {"max_num_batched_tokens": TOKEN_BUDGET},
    }
    with config_values(module, overrides):
        return module.VllmHiddenStatesGenerator(
            model_path=str(model), layer_ids=list(layers), max_model_len=MAX_MODEL_LEN
        )


def _make(
    generator: Any, call: Call, wanted: ReferenceModel, layers: Sequence[int]
) -> tuple[CallOutcome, States | None]:
    try:
        results = generator.generate([list(prompt) for prompt in call.prompts])
    except Exception as error:  # noqa: BLE001 (what is raised is the result)
        traceback.print_exc()
        return CallOutcome(call.name, RAISED, math.inf, _one_line(error)), None
    found = [result["hidden_states"] for result in results]
    return judge(call, found, _expected(wanted, call.prompts, tuple(layers))), found


@lru_cache(maxsize=2)
def _expected(
    wanted: ReferenceModel, prompts: tuple[tuple[int, ...], ...], layers: tuple[int, ...]
) -> list[list[Tensor]]:
    return wanted.hidden_states(prompts, layers)


def judge(call: Call, found: States, expected: States) -> CallOutcome:
    """Compare what a call gave with the reference.

    Args:
        call: the call.
        found: for each result, for each layer: [tokens, hidden size].
        expected: the same for each prompt, for each layer asked for.
    """
    if len(found) != len(expected):
        return CallOutcome(
            call.name, WRONG, math.inf, f"{len(found)} results for {len(expected)} prompts"
        )
    worst = max(map(_distance, found, expected))
    if worst <= TOLERANCE:
        return CallOutcome(call.name, RIGHT, worst)
    ascending = [list(reversed(layers)) for layers in expected]
    for layers, what in ((expected, "inputs"), (ascending, "layers"), (ascending, "both")):
        places = [_place(states, index, layers, what) for index, states in enumerate(found)]
        if None not in places:
            moved = sum(place != index for index, place in enumerate(places))
            order = {
                "inputs": f"{moved} of {len(found)} results are another prompt's",
                "layers": "layers in ascending order, asked for in descending",
                "both": f"layers in ascending order, and {moved} results are another prompt's",
            }
            return CallOutcome(call.name, MISORDERED, worst, order[what])
    bad = sum(_distance(a, b) > TOLERANCE for a, b in zip(found, expected, strict=True))
    return CallOutcome(call.name, WRONG, worst, f"{bad} of {len(found)} results are wrong")


def _place(states: Sequence[Tensor], index: int, expected: States, what: str) -> int | None:
    """Index of the prompt whose states these are."""
    if _distance(states, expected[index]) <= TOLERANCE:
        return index
    if what == "layers":
        return None
    return next((i for i, e in enumerate(expected) if _distance(states, e) <= TOLERANCE), None)


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    if len(found) != len(expected):
        return math.inf
    return max(map(relative_error, found, expected))


def _smallest(found: States, expected: States) -> float:
    return min(map(_distance, found, expected))


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:600]


def main(arguments: Sequence[str]) -> int:
    """``python -m eagle3compat.suite MODEL CONTROL OUT.json``: apply, run all, write it down."""
    import eagle3compat

    model, control, out = map(Path, arguments)
    eagle3compat.apply()
    outcome = run_suite(model, control=control)
    out.write_text(json.dumps(outcome.to_dict(), indent=1))
    return 0 if outcome.right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
