"""How long verify-patches takes, beside importing vLLM, which is what it spares.

    python benchmarks/verify_patches.py [--wheels FOLDER] [--import]

Prints wall clock and peak memory of: verify-patches on the installed pair with an empty facts cache
(median of five, files in the page cache), the same with a warm cache, every vLLM wheel of a folder
in one process with an empty cache, and ``import vllm``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 5


def measure(command: list[str], cache: str) -> tuple[float, float]:
    """Seconds of wall clock and peak MiB of one run, by the kernel's own account."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return seconds, usage.ru_maxrss / 1024


def show(name: str, runs: list[tuple[float, float]]) -> None:
    seconds = statistics.median(run[0] for run in runs)
    memory = max(run[1] for run in runs)
    spread = f"{min(run[0] for run in runs):.2f} to {max(run[0] for run in runs):.2f}"
    print(f"{name:<52}{seconds:8.2f} s  ({spread}, {len(runs)} runs){memory:8.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="a folder with vLLM wheels")
    parser.add_argument("--speculators", help="as for verify-patches")
    parser.add_argument("--import", action="store_true", dest="importing", help="also import vLLM")
    options = parser.parse_args()
    verify = [str(Path(sys.executable).with_name("verify-patches"))]
    with tempfile.TemporaryDirectory() as folder:
        measure(verify, f"{folder}/first")  # brings the files into the page cache
        cold = [measure(verify, f"{folder}/{number}") for number in range(RUNS)]
        show("verify-patches, installed pair, empty facts cache", cold)
        warm = [measure(verify, f"{folder}/0") for _ in range(RUNS)]
        show("verify-patches, installed pair, warm facts cache", warm)
        if options.wheels:
            wheels = sorted(options.wheels.glob("vllm*.whl"))
            command = [*verify, *(part for wheel in wheels for part in ("--vllm", str(wheel)))]
            if options.speculators:
                command += ["--speculators", options.speculators]
            show(f"verify-patches, {len(wheels)} wheels, empty", [measure(command, f"{folder}/w")])
        if options.importing:
            importing = [sys.executable, "-c", "import vllm; vllm.LLM"]
            show("import vllm", [measure(importing, folder) for _ in range(3)])


if __name__ == "__main__":
    main()
