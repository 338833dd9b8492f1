"""The entry point in the group ``vllm.general_plugins``: vLLM calls it in each of its processes.

vLLM loads general plugins in every worker before the worker's classes are resolved
(``vllm/plugins/__init__.py``, ``vllm/v1/worker/worker_base.py``).
"""

from __future__ import annotations

import os
from pathlib import Path


def carry_out_in_worker() -> None:
    """Carry out the plan of the process that started this one; else do nothing.

    Raises:
        PatchError: the plan cannot be carried out here. vLLM ends the worker with this message.
    """
    from eagle3compat.payload import from_environment

    payload = from_environment()
    if payload is None or payload.applier == os.getpid():
        return
    if payload.applier not in _ancestors():
        return  # the variable leaked to a process whose parents did not apply

    from eagle3compat import __version__, applying

    if applying.current() is not None:
        return  # forked: the parent's hooks are in place here as well
    if payload.version != __version__:
        raise applying.PatchError(
            f"eagle3compat {payload.version} made the plan, but this worker imports "
            f"{__version__} from {__file__}. Give both processes the same environment."
        )
    applying.start(payload)


def _ancestors() -> list[int]:
    """Process ids of this process's parent, its parent and so on; only the parent off Linux."""
    chain = [os.getppid()]
    while chain[-1] > 1:
        try:
            stat = Path(f"/proc/{chain[-1]}/stat").read_text()
        except OSError:
            break
        # The command name, in brackets, may hold spaces and brackets itself.
        chain.append(int(stat.rpartition(")")[2].split()[1]))
    return chain
