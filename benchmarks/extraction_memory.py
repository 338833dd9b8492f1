"""Peak memory of an extraction, for a small and a large data set side by side.

    python benchmarks/extraction_memory.py [--samples 100 2000] [--tokens 64]

Extracts from the tiny Kimi-K2.5 through the command line, and prints, for each size of the data
set, the peak of resident memory of the extraction's own process and of vLLM's worker, which holds
and writes the states. Exit code: 1 if a peak differs by more than 5 % between the sizes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from eagle3compat.tiny import write_tiny_kimi

ALLOWED = 0.05
VOCABULARY = 256
PATIENCE = 0.05


def write_data(path: Path, samples: int, tokens: int) -> None:
    random = Random(1)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(samples):
            ids = [random.randrange(VOCABULARY) for _ in range(tokens)]
            stream.write(json.dumps({"input_ids": ids}) + "\n")


def peak(pid: int) -> int:
    """Peak resident bytes of a process so far; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def below(parent: int) -> list[int]:
    """Process ids of the children of a process."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    try:
        return [int(pid) for pid in children.read_text().split()]
    except OSError:
        return []


def extract(model: Path, folder: Path, samples: int, tokens: int) -> tuple[int, int]:
    """Peak bytes of the extraction's process and of the largest of its children."""
    data = folder / f"{samples}.jsonl"
    write_data(data, samples, tokens)
    out = folder / f"out-{samples}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "eagle3compat", "extract", "--model", str(model)),
            *("--data", str(data), "--out", str(out), "--max-num-batched-tokens", "512"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    own, workers = 0, dict[int, int]()
    while process.poll() is None:
        own = max(own, peak(process.pid))
        for pid in below(process.pid):
            workers[pid] = max(workers.get(pid, 0), peak(pid))
        time.sleep(PATIENCE)
    written = len(list((out / "hidden_states").iterdir()))
    if process.returncode or written != samples:
        raise SystemExit(f"the extraction ended with {process.returncode} after {written} samples")
    return own, max(workers.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 2000])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_tiny_kimi(Path(name) / "model")
        peaks = []
        for samples in options.samples:
            own, worker = extract(Path(name) / "model", Path(name), samples, options.tokens)
            peaks.append((own, worker))
            print(
                f"{samples:>7} samples: extraction {own / 2**20:7.1f} MiB, "
                f"worker {worker / 2**20:7.1f} MiB",
                flush=True,
            )
    spreads = [max(each) / min(each) - 1 for each in zip(*peaks, strict=True)]
    print(f"apart: extraction {spreads[0]:.1%}, worker {spreads[1]:.1%}")
    sys.exit(any(spread > ALLOWED for spread in spreads))


if __name__ == "__main__":
    main()
