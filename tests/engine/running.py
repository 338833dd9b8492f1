"""Scripts in interpreters of their own, in the environment that vLLM wants on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

Run = Callable[..., Any]


def run_script(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS…`` to its end, whatever that is."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | CPU_ENVIRONMENT | (environment or {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
