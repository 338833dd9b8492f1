"""Tokens a second of plain prefill, of extraction, and of what else extracts hidden states.

    python benchmarks/extraction_speed.py [--tokens 524288] [--disk FOLDER] [--repeat 1]
        [--tensor-parallel-size 1] [--only PEER …] [--shape kimi|tiny]

One run shows all peers, each in a process of its own, on the same prompts, with the same token
budget a step:

plain       vLLM's ``LLM.generate`` with nothing captured: as fast as the engine prefills
ours        `eagle3compat.kimi.extraction` to a memory file system, every sample proved
ours, disk  the same to ``--disk``
connector   vLLM's own ``extract_hidden_states`` with ``ExampleHiddenStatesConnector`` to a memory
            file system (from vLLM 0.18 on)
rpc         ``generate()`` of speculators' generator, which returns the states by collective_rpc

"generating" is until the engine's last step, "safe" until the last byte is written (and, for ours,
each sample proved). The shape ``kimi`` is Kimi-K2.5's in width and vocabulary with 6 layers and 32
experts, and random weights (``load_format="dummy"``): it needs a GPU. The shape ``tiny`` is the
tiny Kimi-K2.5, for a CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

MEMORY = Path("/dev/shm")
PEERS = ("plain", "ours", "ours, disk", "connector", "rpc")
# The rpc path is so slow that fewer tokens show it.
RPC_SHARE = 8
WARM_UP_PROMPTS = 8
SEQUENCES = 32
SPECULATORS_EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"
SEED = 0

KIMI = {
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "num_hidden_layers": 6,
    "vocab_size": 163_840,
    "max_position_embeddings": 32_768,
    "rope_scaling": None,
}


@dataclass(frozen=True)
class Shape:
    """What is extracted from which prompts."""

    layers: tuple[int, ...]
    prompt_tokens: int
    tokens_a_step: int
    vocabulary: int
    load_format: str


SHAPES = {
    "kimi": Shape((1, 2, 3, 5), 2048, 8192, 163_000, "dummy"),
    "tiny": Shape((2, 4, 5, 7), 256, 2048, 250, "auto"),
}


@dataclass(frozen=True)
class Task:
    """One peer's run, as its process is told of it."""

    peer: str
    shape: str
    model: str
    out: str
    prompts: int
    tensor_parallel_size: int

    @property
    def settings(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def tokens(self) -> int:
        return self.prompts * self.settings.prompt_tokens


def write_model(folder: Path, shape: str) -> None:
    from eagle3compat.tiny import Variant, write_tiny_kimi

    write_tiny_kimi(folder, variant=Variant(mla_gpu=shape == "kimi"))
    if shape == "kimi":
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["text_config"].update(KIMI)
        file.write_text(json.dumps(config))


def prompts(task: Task, count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    shape = task.settings
    return [
        [random.randrange(shape.vocabulary) for _ in range(shape.prompt_tokens)]
        for _ in range(count)
    ]


def measure_llm(task: Task) -> dict[str, float]:
    """Plain prefill, or vLLM's own extraction."""
    from vllm import LLM, SamplingParams

    shape = task.settings
    options: dict[str, Any] = {}
    if task.peer == "connector":
        ids = [layer + 1 for layer in shape.layers]  # a layer's input there
        options["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        }
        options["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": task.out},
        }
    engine = LLM(
        model=task.model,
        trust_remote_code=True,
        load_format=shape.load_format,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=shape.prompt_tokens + 1,
        max_num_batched_tokens=shape.tokens_a_step,
        max_num_seqs=SEQUENCES,
        tensor_parallel_size=task.tensor_parallel_size,
        limit_mm_per_prompt={"vision_chunk": 0},
        **options,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def generate(count: int, seed: int) -> list[Any]:
        inputs = [{"prompt_token_ids": ids} for ids in prompts(task, count, seed)]
        return engine.generate(inputs, sampling, use_tqdm=False)

    generate(WARM_UP_PROMPTS, SEED + 1)
    inputs = [{"prompt_token_ids": ids} for ids in prompts(task, task.prompts, SEED)]
    start = time.perf_counter()
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    generating = time.perf_counter() - start
    if task.peer == "connector":
        for output in outputs:
            wait_until_written(Path(output.kv_transfer_params["hidden_states_path"]))
    return {"generating": generating, "safe": time.perf_counter() - start}


def wait_until_written(path: Path) -> None:
    """The connector's writer holds a lock beside the file until the file is whole."""
    with Path(f"{path}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def job_for(task: Task, folder: Path, count: int, seed: int) -> Any:
    from eagle3compat.kimi.extraction import Settings, prepare

    shape = task.settings
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    with data.open("w") as stream:
        for ids in prompts(task, count, seed):
            stream.write(json.dumps({"input_ids": ids}) + "\n")
    return prepare(
        Settings(
            model=Path(task.model),
            data=data,
            out=folder / "out",
            layers=shape.layers,
            max_model_len=shape.prompt_tokens + 1,
            max_num_batched_tokens=shape.tokens_a_step,
            tensor_parallel_size=task.tensor_parallel_size,
        )
    )


def measure_generator(task: Task) -> dict[str, float]:
    """Our extraction, or speculators' own generate()."""
    from eagle3compat.kimi.extraction import extract, open_generator

    out = Path(task.out)
    warm_up = job_for(task, out / "warm-up", WARM_UP_PROMPTS, SEED + 1)
    job = job_for(task, out / "measured", task.prompts, SEED)
    config: dict[str, Any] = {"LoadConfig": {"load_format": task.settings.load_format}}
    if task.peer == "rpc":
        config["ParallelConfig"] = {"worker_extension_cls": SPECULATORS_EXTENSION}
    generator = open_generator(warm_up, config)
    try:
        if task.peer == "rpc":
            return {"safe": time_rpc(task, generator)}
        extract(warm_up, generator, lambda record: None)
        summary = extract(job, generator, lambda record: None)
    finally:
        generator.executor.shutdown()
    if summary.set_aside or summary.unproved or summary.done != task.prompts:
        raise SystemExit(f"not every sample is proved: {summary.set_aside[:3]} {summary.unproved}")
    return {
        "generating": summary.generating_seconds,
        "safe": summary.seconds,
        "bytes": float(summary.written_bytes),
    }


def time_rpc(task: Task, generator: Any) -> float:
    """Batches of speculators' own size; nothing is written."""
    generator.generate(prompts(task, WARM_UP_PROMPTS, SEED + 1))
    inputs = prompts(task, task.prompts, SEED)
    start = time.perf_counter()
    for first in range(0, len(inputs), WARM_UP_PROMPTS):
        generator.generate(inputs[first : first + WARM_UP_PROMPTS])
    return time.perf_counter() - start


def run_apart(task: Task) -> dict[str, float]:
    """Measure one peer in a process of its own, and take away what it wrote."""
    command = [sys.executable, __file__, "--task", json.dumps(vars(task))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(task.out, ignore_errors=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        error = done.stderr.strip().splitlines()[-30:]
        print(f"{task.peer}: failed\n" + "\n".join(error), flush=True)
        return {}
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def show(task: Task, figures: dict[str, float], plain: float | None) -> None:
    for until in ("generating", "safe"):
        if until in figures:
            rate = task.tokens / figures[until]
            share = f"{rate / plain:8.3f}" if plain else ""
            gigabytes = f"{figures['bytes'] / 1e9:8.1f} GB" if "bytes" in figures else ""
            print(
                f"{task.peer:<12}{until:<12}{task.tokens:>9} tokens{rate:>10,.0f} /s{share}"
                f"{gigabytes}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task = Task(**json.loads(options.task))
        measured = (
            measure_llm(task) if task.peer in ("plain", "connector") else measure_generator(task)
        )
        print(json.dumps(measured), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_model(model, options.shape)
        count = options.tokens // SHAPES[options.shape].prompt_tokens
        plain = None
        for _ in range(options.repeat):
            for peer in options.only:
                place = options.disk if peer == "ours, disk" else MEMORY
                out = tempfile.mkdtemp(prefix="eagle3compat-speed-", dir=place)
                size = options.tensor_parallel_size
                task = Task(peer, options.shape, str(model), out, count, size)
                if peer == "rpc":
                    task = replace(task, prompts=max(count // RPC_SHARE, WARM_UP_PROMPTS))
                figures = run_apart(task)
                if peer == "plain" and figures:
                    plain = task.tokens / figures["safe"]
                show(task, figures, plain)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main()
