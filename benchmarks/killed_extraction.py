"""Whether an extraction that is killed again and again ends with the files of one that was not.

    python benchmarks/killed_extraction.py [--kills 20] [--seed 0] [--samples 240]

Extracts a data set from the tiny Kimi-K2.5 once undisturbed. Then it does so again in another
folder, and at random moments kills (SIGKILL) the extraction or one of vLLM's workers, in turn, and
starts it anew, until it has been killed as often as asked and has ended. Prints where each kill
struck, and compares: the same files, byte for byte, each sample in the manifest once, and nothing
else. Exit code: 0 if all of that holds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from eagle3compat.kimi.manifest import read_manifests
from eagle3compat.tiny import write_tiny_kimi

LENGTHS = (1, 2, 5, 17, 40, 80, 150, 300, 700)
TOKENS_A_STEP = 256
VOCABULARY = 256
# Seconds that a run goes on after the sample at which it is struck, at most.
LONGEST = 0.2
PATIENCE = 300.0


@dataclass(frozen=True)
class Extraction:
    """One extraction to a folder, which may take several starts."""

    model: Path
    data: Path
    out: Path

    def start(self) -> subprocess.Popen[bytes]:
        options = {"model": self.model, "data": self.data, "out": self.out}
        arguments = [str(part) for key, value in options.items() for part in (f"--{key}", value)]
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "eagle3compat", "extract", *arguments),
                *("--dtype", "float32", "--max-num-batched-tokens", str(TOKENS_A_STEP)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def lines(self) -> int:
        """Lines of its manifest."""
        return sum(path.read_bytes().count(b"\n") for path in self.out.glob("manifest-*"))

    def done(self) -> int:
        """Samples that are in their place."""
        return sum(1 for _ in (self.out / "hidden_states").glob("*.pt"))

    def files(self) -> dict[str, bytes]:
        """Every sample file."""
        return {path.name: path.read_bytes() for path in (self.out / "hidden_states").iterdir()}


def write_data(path: Path, samples: int) -> None:
    random = Random(1)
    rows = [
        {"input_ids": [random.randrange(VOCABULARY) for _ in range(random.choice(LENGTHS))]}
        for _ in range(samples)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def descendants(parent: int) -> list[int]:
    """Process ids below a process."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.split()
    children: dict[int, list[int]] = {}
    for child, above in zip(listed[::2], listed[1::2], strict=True):
        children.setdefault(int(above), []).append(int(child))
    found = list(children.get(parent, []))
    for process in found:
        found.extend(children.get(process, []))
    return found


def workers(parent: int) -> list[int]:
    """vLLM's worker processes below a process, by what they call themselves."""
    names = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(parent)}
    return [
        pid
        for pid, name in names.items()
        if name.exists() and b"resource_tracker" not in name.read_bytes()
    ]


def strike(extraction: Extraction, random: Random, samples: int, *, worker: bool) -> str:
    """Start, kill within so many samples, and wait until nothing of it is left."""
    before = extraction.lines()
    process = extraction.start()
    deadline = time.monotonic() + PATIENCE
    # The run's own line says that its engine is up; what is killed earlier has written nothing. A
    # moment told by samples is within the writing on a machine of any speed.
    struck_at = before + 1 + random.randint(0, samples)
    while process.poll() is None and extraction.lines() < struck_at and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, LONGEST))
    if process.poll() is not None:
        return "ended before the kill"
    below = workers(process.pid)
    os.kill(random.choice(below) if worker and below else process.pid, signal.SIGKILL)
    done = extraction.lines() - before
    struck = time.monotonic()
    output, _ = process.communicate(timeout=PATIENCE)
    ended = time.monotonic() - struck
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        time.sleep(0.05)
    lines = output.decode(errors="replace").splitlines()
    said = next((line for line in lines if line.startswith("error:")), "")
    return (
        f"killed a {'worker' if worker else 'parent'} after {max(done - 1, 0)} samples of the run; "
        f"exit {process.returncode} after {ended:.1f} s {said[:110]}"
    )


def finish(extraction: Extraction) -> None:
    process = extraction.start()
    output, _ = process.communicate(timeout=PATIENCE)
    if process.returncode:
        raise SystemExit(output.decode(errors="replace"))


def compare(undisturbed: Extraction, killed: Extraction, samples: int) -> list[str]:
    """What is not as it should be."""
    expected, found = undisturbed.files(), killed.files()
    faults = [f"{name}: missing" for name in expected.keys() - found.keys()]
    faults += [f"{name}: one too many" for name in found.keys() - expected.keys()]
    faults += [
        f"{name}: other bytes"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    (manifest,) = read_manifests(killed.out)
    rows = [json.loads(line) for line in manifest.path.read_text().splitlines()]
    listed = [row["index"] for row in rows if row["kind"] == "sample"]
    if sorted(listed) != list(range(samples)):
        faults.append("the manifest does not have each sample once")
    if any((killed.out / "unfinished" / "0-of-1").iterdir()):
        faults.append("unfinished files are left")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_kimi(folder / "model")
        write_data(folder / "data.jsonl", options.samples)
        inputs = (folder / "model", folder / "data.jsonl")
        undisturbed = Extraction(*inputs, folder / "undisturbed")
        finish(undisturbed)
        killed = Extraction(*inputs, folder / "killed")
        for number in range(options.kills):
            left = options.samples - killed.done()
            share = left // (options.kills - number + 1)
            print(number + 1, strike(killed, random, share, worker=number % 2 == 1), flush=True)
        finish(killed)
        faults = compare(undisturbed, killed, options.samples)
    print(
        *(faults or [f"{options.samples} files, byte for byte those of a run undisturbed"]),
        sep="\n",
    )
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
