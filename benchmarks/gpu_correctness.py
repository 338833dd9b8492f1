"""Whether extraction is right on a GPU, where no float32 reference can be met exactly.

    python benchmarks/gpu_correctness.py [--tensor-parallel-size N] [--model-runner-v2]

MLA kernels take 16-bit floats alone, so the yardstick is what rounding explains by itself: the
error of transformers in bfloat16 on the same weights. Every state that the generator returns
is compared with transformers in float32, row by row. It is right when its error is of the size of
that rounding, and when no other prompt's, position's or layer's state is nearer to it than its own.

The checkpoint is the tiny Kimi-K2.5 with the head dimensions of MLA, and routes every token to all
experts unless told otherwise: a rounded router then moves none. The batches are those of
`eagle3compat.suite`. EAGLE3COMPAT_DISABLE leaves shims out, to see what each is for. Needs the
installed package, vLLM, speculators 0.3 or 0.4 and a GPU. Exit code: 0 if everything is right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eagle3compat
from eagle3compat.reference import ReferenceModel
from eagle3compat.suite import KV_CACHE_BLOCKS, MAX_MODEL_LEN, TOKEN_BUDGET, hard_calls
from eagle3compat.tiny.checkpoint import write_tiny_kimi
from eagle3compat.tiny.configuration import Variant

if TYPE_CHECKING:
    from torch import Tensor

    States = Sequence[Sequence[Tensor]]

# Kernels that round at other places than transformers: more than this is no rounding.
LIMIT = 3.0
# A state that is half as far from another place as from its own is that other place's. Equal
# prefixes, and prompts of one repeated token, have equal states: those are as far, not nearer.
NEARER = 0.5


@dataclass(frozen=True)
class Judgement:
    """How far one call's states are from the reference.

    Args:
        errors: relative error of each row, one tensor [rows] a layer.
        rounding: the same for transformers in bfloat16.
        strays: rows that are nearer to another place's reference than to their own.
        rows: rows of all layers.
    """

    errors: list[Tensor]
    rounding: list[Tensor]
    strays: int
    rows: int

    @property
    def ratio(self) -> float:
        """Worst error by worst rounding error, for the layer where that is largest."""
        return max(
            float(ours.max() / own.max())
            for ours, own in zip(self.errors, self.rounding, strict=True)
        )


def write_checkpoint(folder: Path, experts_per_token: int) -> None:
    """A tiny Kimi-K2.5 with the dimensions of MLA kernels and the given number of experts."""
    write_tiny_kimi(folder, variant=Variant(mla_gpu=True, yarn=True))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"]["num_experts_per_tok"] = experts_per_token
    path.write_text(json.dumps(config), encoding="utf-8")


def rounded(folder: Path) -> ReferenceModel:
    """The reference with weights and states in bfloat16; its buffers, as ever, in float32."""
    import torch

    reference = ReferenceModel.load(folder)
    for parameter in reference.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return reference


def open_generator(model: Path, layers: Sequence[int], options: argparse.Namespace) -> Any:
    """Speculators' generator, with the suite's small limits or its own."""
    from speculators.data_generation import vllm_hidden_states_generator as module

    from eagle3compat.kimi.extraction import config_values

    overrides: dict[str, dict[str, Any]] = {"ModelConfig": {"dtype": "bfloat16"}}
    if not options.own_limits:
        overrides["CacheConfig"] = {"num_gpu_blocks_override": KV_CACHE_BLOCKS}
        overrides["SchedulerConfig"] = {"max_num_batched_tokens": TOKEN_BUDGET}
    with config_values(module, overrides):
        return module.VllmHiddenStatesGenerator(
            model_path=str(model),
            layer_ids=list(layers),
            max_model_len=MAX_MODEL_LEN,
            tensor_parallel_size=options.tensor_parallel_size,
        )


def device_name() -> str:
    """What this process computes on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def describe_worker(worker: Any) -> dict[str, Any]:
    """What runs in a worker; sent there by value."""
    runner = worker.model_runner
    attention = {
        type(getattr(part, "impl", None)).__name__
        for part in runner.model.modules()
        if hasattr(part, "impl")
    }
    return {
        "model runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "attention": sorted(attention),
        "asynchronous scheduling": worker.vllm_config.scheduler_config.async_scheduling,
        "block size": worker.vllm_config.cache_config.block_size,
        "KV cache blocks": worker.vllm_config.cache_config.num_gpu_blocks,
    }


def judge(found: States, expected: States, own: States) -> Judgement:
    """Compare one call's states, for each prompt, for each layer: [tokens, hidden size]."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, wanted, rounding = (_by_layer(each, device) for each in (found, expected, own))
    everywhere = torch.cat(wanted)
    strays = 0
    for layer, states in enumerate(ours):
        for rows, right in zip(states.split(1024), wanted[layer].split(1024), strict=True):
            nearest = torch.cdist(rows, everywhere).min(dim=1).values
            strays += int((nearest < NEARER * (rows - right).norm(dim=1)).sum())
    return Judgement(
        [_errors(a, b) for a, b in zip(ours, wanted, strict=True)],
        [_errors(a, b) for a, b in zip(rounding, wanted, strict=True)],
        strays,
        len(everywhere),
    )


def _by_layer(states: States, device: str) -> list[Tensor]:
    import torch

    return [torch.cat(list(layer)).to(device).double() for layer in zip(*states, strict=True)]


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    return ((found - expected).norm(dim=1) / expected.norm(dim=1)).cpu()


def lacking(found: States, expected: States) -> str:
    """What makes the results impossible to compare, or nothing."""
    if len(found) != len(expected):
        return f"{len(found)} results for {len(expected)} prompts"
    shapes = [[tuple(layer.shape) for layer in states] for states in (*found, *expected)]
    wrong = sum(a != b for a, b in zip(shapes[: len(found)], shapes[len(found) :], strict=True))
    if wrong:
        return f"{wrong} of {len(found)} results have other shapes than their prompts"
    if not all(bool(layer.isfinite().all()) for states in found for layer in states):
        return "states that are not finite"
    return ""


def control(expected: States, own: States) -> None:
    """Show that the comparison can fail: states of the next position, and of the next layer."""
    position = [[layer.roll(1, 0) for layer in states] for states in own]
    layers = [[*states[1:], states[0]] for states in own]
    for what, states in (("position", position), ("layer", layers)):
        judged = judge(states, expected, own)
        print(f"control, the next {what}'s states: {judged.strays} of {judged.rows} rows stray")


def run_calls(generator: Any, model: Path, layers: Sequence[int]) -> bool:
    """Make every hard call, print what it gave; whether all of it is right."""
    import torch

    exact, rough = ReferenceModel.load(model), rounded(model)
    judgements: list[Judgement] = []
    right = True
    for call in hard_calls():
        prompts = [list(prompt) for prompt in call.prompts]
        found = [result["hidden_states"] for result in generator.generate(prompts)]
        expected = exact.hidden_states(prompts, layers)
        fault = lacking(found, expected)
        if fault:
            print(f"  {call.name:<46} WRONG: {fault}", flush=True)
            right = False
            continue
        own = rough.hidden_states(prompts, layers)
        judged = judge(found, expected, own)
        judgements.append(judged)
        good = judged.strays == 0 and judged.ratio <= LIMIT
        right = right and good
        print(
            f"  {call.name:<46} {'right' if good else 'WRONG'}: worst "
            f"{max(map(torch.max, judged.errors)):.1e}, rounding alone "
            f"{max(map(torch.max, judged.rounding)):.1e}, at most {judged.ratio:.2f} times it "
            f"in a layer; {judged.strays} of {judged.rows} rows stray",
            flush=True,
        )
        if call.name.startswith("40"):
            control(expected, own)
    _show_layers(layers, judgements)
    return right


def _show_layers(layers: Sequence[int], judgements: Sequence[Judgement]) -> None:
    import torch

    print("  layer: error median / worst of all rows; rounding alone median / worst")
    for index, layer in enumerate(layers if judgements else ()):
        ours = torch.cat([judged.errors[index] for judged in judgements])
        own = torch.cat([judged.rounding[index] for judged in judgements])
        print(
            f"  {layer}: {ours.median():.2e} / {ours.max():.2e}; "
            f"{own.median():.2e} / {own.max():.2e}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts-per-token", type=int, default=8, help="of 8; all by default")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--model-runner-v2", action="store_true", help="vLLM's V2 model runner")
    parser.add_argument(
        "--own-limits", action="store_true", help="token budget and KV cache as speculators has it"
    )
    options = parser.parse_args()
    if options.model_runner_v2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

    plan = eagle3compat.apply()
    print(f"speculators {plan.consumer.version} on vLLM {plan.provider.version}:", vars(options))
    print("shims:", ", ".join(decision.shim.id for decision in plan.needed))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "tiny-kimi")
        write_checkpoint(model, options.experts_per_token)
        layers = tuple(reversed(range(8)))
        start = time.monotonic()
        generator = open_generator(model, layers, options)
        try:
            print(f"engine up in {time.monotonic() - start:.0f} s on {device_name()}")
            for worker in generator.executor.collective_rpc(describe_worker):
                print("worker:", worker)
            for report in generator.executor.collective_rpc("_eagle3compat_report"):
                print("worker answers:", report)
            right = run_calls(generator, model, layers)
        finally:
            generator.executor.shutdown()
    print("settled in the parent:", dict(eagle3compat.status().settled))
    print("RIGHT" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
