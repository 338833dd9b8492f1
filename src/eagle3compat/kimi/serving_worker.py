"""Serves drafts with vLLM, one after the other, and counts what the verifier accepts.

`eagle3compat.kimi.serving` runs this file, by its path, in the interpreter that serves. So it uses
nothing but the standard library and vLLM: our package need not be installed there.

    python serving_worker.py --which          prints which vLLM that interpreter has, in JSON
    python serving_worker.py JOB RESULTS      appends a line of JSON to RESULTS for each draft
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"


def which() -> dict[str, Any]:
    """Where vLLM is and which build, without importing it."""
    from importlib.metadata import packages_distributions, version
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    names = packages_distributions().get("vllm", [])
    return {
        "folder": str(Path(spec.origin).parent),
        "distributions": {name: version(name) for name in names},
    }


def serve(job: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily with one draft.

    Args:
        job: ``model``, ``prompts`` (token ids), ``new_tokens``, ``dtype``, ``max_model_len``.
        draft: ``path`` and ``draft_tokens``.

    Returns:
        The counters of speculative decoding, the generated token ids, the seconds of both phases.
    """
    import vllm
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(
        **_engine_options(job),
        speculative_config={
            "method": "eagle3",
            "model": draft["path"],
            "num_speculative_tokens": draft["draft_tokens"],
        },
    )
    try:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        sampling = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)
        before = _counters(llm)
        ready = time.monotonic()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        done = time.monotonic()
        after = _counters(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return {
        "vllm": vllm.__version__,
        "counters": {name: _difference(after[name], before.get(name)) for name in after},
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "start_seconds": ready - started,
        "seconds": done - ready,
    }


def _engine_options(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.platforms import current_platform

    options: dict[str, Any] = {
        "model": job["model"],
        "trust_remote_code": True,
        "dtype": job["dtype"],
        "max_model_len": job["max_model_len"],
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    if job["multimodal"]:
        options["limit_mm_per_prompt"] = {"vision_chunk": 0}
    if current_platform.is_cpu():
        # vLLM's own kernel for the CPU turns positions wrongly; its plain one is right.
        options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return options


def _counters(llm: Any) -> dict[str, Any]:
    """A number, or a list of them by position, for each counter of speculative decoding."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            values = getattr(metric, "values", None)
            found[metric.name.removeprefix(PREFIX)] = metric.value if values is None else values
    return found


def _difference(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after))]  # noqa: B905
    return after - (before or 0)


def main(job_file: str, results_file: str) -> None:
    """Serve each draft of the job."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    for draft in job["drafts"]:
        result = serve(job, draft)
        with Path(results_file).open("a", encoding="utf-8") as results:
            results.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    # Run by its path, Python puts this folder first: its modules must not hide others.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != here]
    if sys.argv[1:] == ["--which"]:
        print(json.dumps(which()))
    else:
        main(*sys.argv[1:])
