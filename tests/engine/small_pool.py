"""Extracts through an engine whose KV cache holds fewer tokens than a step: MODEL DATA FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3compat.kimi.extraction import Settings, extract, open_generator, prepare

BLOCKS = 24
"""Blocks of 16 tokens: enough for the longest prompt, not for all that a step may take."""
TOKENS_A_STEP = 1024


def main() -> None:
    model, data, out = map(Path, sys.argv[1:])
    job = prepare(
        Settings(
            model, data, out, dtype="float32", max_num_batched_tokens=TOKENS_A_STEP, max_num_seqs=64
        )
    )
    generator = open_generator(job, {"CacheConfig": {"num_gpu_blocks_override": BLOCKS}})
    try:
        summary = extract(job, generator, lambda record: None)
    finally:
        generator.executor.shutdown()
    print(f"{summary.done} done, {len(summary.set_aside)} set aside")


if __name__ == "__main__":
    main()
