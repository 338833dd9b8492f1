"""A plain vLLM engine that applies nothing: ``python stock_engine.py CHECKPOINT OUT.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Witness:
    """Worker extension: what of this project is in the worker."""

    def ours(self) -> dict[str, Any]:
        names = [name for name in sys.modules if name.startswith("eagle3compat")]
        return {
            "plugin": "eagle3compat.plugin" in names,
            "shims": [name for name in names if "shims" in name or "importing" in name],
        }


def main(model: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        trust_remote_code=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        # Without this, vLLM's CPU rotary kernel gives other tokens from one run to the next.
        compilation_config={"custom_ops": ["-rotary_embedding"]},
        limit_mm_per_prompt={"vision_chunk": 0},
        worker_extension_cls="stock_engine.Witness",
    )
    prompts = [{"prompt_token_ids": list(range(30, 30 + length))} for length in (1, 7, 40)]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    generated = [list(result.outputs[0].token_ids) for result in engine.generate(prompts, sampling)]
    (worker,) = engine.collective_rpc("ours")
    Path(out).write_text(json.dumps({"generated": generated, "worker": worker}))


if __name__ == "__main__":
    main(*sys.argv[1:])
