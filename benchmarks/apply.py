"""What ``import eagle3compat; eagle3compat.apply()`` costs, beside the imports that it avoids.

``python benchmarks/apply.py [RUNS]``, in an environment that holds vLLM and speculators. Each
figure is the median of fresh interpreters, without the interpreter's own start.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TIMED = """
import time
start = time.perf_counter()
{work}
print(time.perf_counter() - start)
"""
APPLY = "import eagle3compat; eagle3compat.apply()"


def main(runs: int) -> None:
    """Print one line a peer."""
    with tempfile.TemporaryDirectory() as cache:
        cold = [_seconds(APPLY, Path(cache, str(number))) for number in range(runs)]
        warm = [_seconds(APPLY, Path(cache, "0")) for _ in range(runs)]
        imported = [_seconds("import vllm, speculators", Path(cache, "0")) for _ in range(3)]
    for title, seconds in (
        ("apply(), facts not cached", cold),
        ("apply(), facts cached", warm),
        ("import vllm, speculators", imported),
    ):
        print(f"{title:28} {1000 * statistics.median(seconds):8.0f} ms (median of {len(seconds)})")


def _seconds(work: str, cache: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(work=work)],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
