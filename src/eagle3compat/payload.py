"""The part of a plan that travels to worker processes, in an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

ENVIRONMENT_VARIABLE = "EAGLE3COMPAT_PLAN"


@dataclass(frozen=True)
class Payload:
    """What a process needs to carry a plan out.

    Args:
        version: version of eagle3compat that made the plan.
        applier: process id of the process that called ``apply()``.
        shims: ids of the shims to carry out.
        consumer_dir: folder of the speculators package that the plan was made for.
        provider_dir: folder of the vLLM package that the plan was made for; empty where vLLM takes
            no part, in training alone.
        stages: what the shims make ready: "extraction", "training" or both. The other is refused.
    """

    version: str
    applier: int
    shims: tuple[str, ...]
    consumer_dir: str
    provider_dir: str
    stages: tuple[str, ...] = ("extraction",)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Payload:
        """Read what ``to_json`` wrote; raises ``ValueError`` on anything else."""
        try:
            fields = json.loads(text)
            lists = {key: tuple(fields[key]) for key in ("shims", "stages")}
            return cls(**(fields | lists))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{ENVIRONMENT_VARIABLE} holds no plan of ours: {error}") from error

    def same_plan(self, other: Payload) -> bool:
        """Whether both carry the same shims out on the same builds."""
        return (self.shims, self.consumer_dir, self.provider_dir, self.stages) == (
            other.shims,
            other.consumer_dir,
            other.provider_dir,
            other.stages,
        )


def from_environment() -> Payload | None:
    """The payload that an applying process left for its children, if any."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    return None if not text else Payload.from_json(text)
