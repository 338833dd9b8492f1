"""Whether the files of an extraction are right, told from the files and the checkpoint alone.

A folder that ``eagle3compat extract`` wrote has manifests, which record each sample's input, the
checksum of every layer and the engine's next token: each file is held against its record. A folder
that speculators wrote has none; `eagle3compat.kimi.crosschecks` says what can still be told. A
random share of the samples may be extracted anew, alone (`eagle3compat.kimi.anew`).

Memory stays bounded: files are mapped and read in blocks, a few at a time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.audit_recorded import RecordedAudit
from eagle3compat.kimi.audit_unrecorded import UnrecordedAudit
from eagle3compat.kimi.findings import Finding
from eagle3compat.kimi.manifest import read_manifests
from eagle3compat.kimi.verifier import read_verifier

Watch = Callable[[str, int, int], None]
"""Called with a step's name, what of it is done, and all of it."""


@dataclass(frozen=True)
class AuditSettings:
    """What to audit.

    Args:
        folder: of an extraction, or of files that speculators wrote.
        model: folder of the verifier; None for the one that the manifest names.
        layers: layer ids of files without a manifest; None for speculators' default.
        again_share: share of the samples to extract anew, 0 to 1.
        again_count: how many to extract anew, at least.
        seed: of their choice.
        tensor_parallel_size: GPUs that share the verifier then; None for as many as the manifest
            says, or one.
        workers: files that are read at the same time.
    """

    folder: Path
    model: Path | None = None
    layers: tuple[int, ...] | None = None
    again_share: float = 0.0
    again_count: int = 0
    seed: int = 0
    tensor_parallel_size: int | None = None
    workers: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))

    def again_of(self, samples: int) -> int:
        """How many of so many samples are extracted anew."""
        return min(samples, max(self.again_count, -int(-self.again_share * samples // 1)))


@dataclass
class AuditReport:
    """What an audit saw.

    Args:
        folder: that was audited.
        recorded: whether it has manifests.
        samples: files that were read.
        tokens: of them.
        bytes: of them.
        findings: what is wrong, in the order of the samples.
        checked: what was checked, a sentence each.
        not_checked: what could not be, with the reason, a sentence each.
        notes: what is worth knowing and is no fault.
        again: samples that were extracted anew.
        again_worst: for each layer id, the largest relative error of a row that was found then,
            and what rounding explains.
        seconds: wall clock.
    """

    folder: Path
    recorded: bool
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    again: tuple[int, ...] = ()
    again_worst: dict[int, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """The report as JSON: as the fields, with the kinds' words and ``right``."""
        return {
            "right": self.right,
            "folder": str(self.folder),
            "recorded": self.recorded,
            "samples": self.samples,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "findings": [
                {"sample": each.sample, "file": each.place, "kind": each.kind, "what": each.what}
                for each in self.findings
            ],
            "checked": self.checked,
            "not_checked": self.not_checked,
            "notes": self.notes,
            "again": {
                "samples": list(self.again),
                "layers": {
                    str(layer): {
                        # JSON has no infinity: that of a NaN, or of a row that should be zero.
                        "largest_error": worst if math.isfinite(worst) else None,
                        "explained_by_rounding": bound,
                    }
                    for layer, (worst, bound) in self.again_worst.items()
                },
            },
            "seconds": round(self.seconds, 3),
        }


def audit(settings: AuditSettings, watch: Watch = lambda step, done, whole: None) -> AuditReport:
    """Check every sample of a folder.

    Args:
        settings: what to check.
        watch: told of the progress.

    Raises:
        InputError: the folder holds no samples, its manifest is none, the checkpoint that is named
            is none, or samples are to be extracted anew and what that takes is not there.
        Refusal: samples are to be extracted anew, and these builds do not work together.
    """
    start = time.monotonic()
    if not settings.folder.is_dir():
        raise InputError(f"{settings.folder}: no such folder; give the folder of an extraction")
    if settings.model is not None:
        read_verifier(settings.model)
    manifests = read_manifests(settings.folder)
    report = AuditReport(settings.folder, recorded=bool(manifests))
    if manifests:
        RecordedAudit(report, settings, manifests, watch).carry_out()
    else:
        UnrecordedAudit(report, settings, watch).carry_out()
    report.findings.sort(key=lambda each: (each.sample is None, each.sample or 0))
    report.seconds = time.monotonic() - start
    return report
