"""Whatever the order of imports, apply and restore: the real modules are patched, or as shipped.

Each order runs in a process of its own, with the real vLLM and speculators, and no engine. The
processes are forked from one that has imported vLLM, but none of the modules that are patched.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

PRELUDE = """
import importlib, sys, threading, warnings
import wrapt
import eagle3compat
from eagle3compat.shim import Stage, shim
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
WORKER = "speculators.data_generation.custom_worker"

def import_both():
    return importlib.import_module(GENERATOR), importlib.import_module(WORKER)

def traces():
    "What of ours stands in the real modules."
    found = []
    for name in (GENERATOR, WORKER):
        module = sys.modules[name]
        spaces = [vars(module)] + [
            vars(value) for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == name
        ]
        for space in spaces:
            for key, value in space.items():
                files = {
                    getattr(getattr(part, "__code__", None), "co_filename", "")
                    for part in (value, *getattr(value, '__dict__', {}).values())
                } if isinstance(value, type) or hasattr(value, "__code__") else set()
                if (
                    key.startswith("_eagle3compat")
                    or issubclass(type(value), wrapt.ObjectProxy | wrapt.FunctionWrapper)
                    or any("eagle3compat" in file for file in files)
                ):
                    found.append(f"{name}.{key}")
    return found

def assert_patched():
    generator, worker = import_both()
    import vllm.v1.core.sched.scheduler as scheduler
    assert issubclass(generator.Scheduler, scheduler.Scheduler)
    assert generator.Scheduler is not scheduler.Scheduler
    status = eagle3compat.status()
    # Those for training alone wait for modules that extraction does not import.
    ours = {name for name in status.shims if Stage.EXTRACTION in shim(name).stages}
    assert status.applied and len(ours) > 15 and ours <= set(status.live), status
    assert len(set(traces())) > 15, traces()

def assert_as_shipped():
    generator, worker = import_both()
    import vllm.v1.core.sched.scheduler as scheduler
    assert generator.Scheduler is scheduler.Scheduler
    assert traces() == [], traces()
    assert not eagle3compat.status().applied
    import os
    assert "EAGLE3COMPAT_PLAN" not in os.environ

STEPS = {"I": import_both, "A": eagle3compat.apply, "R": eagle3compat.restore}
"""

ORDERS = ("AI", "IA", "AAI", "AIA", "IAA", "AIR", "IAR", "ARI", "AIRA", "IARA", "ARAI", "IARARR")

HALF_IMPORTED = """
class Trigger:
    def find_spec(self, name, path=None, target=None):
        if name == "speculators.data_generation.logging_utils" and GENERATOR in sys.modules:
            sys.meta_path.remove(self)
            assert sys.modules[GENERATOR].__spec__._initializing
            eagle3compat.apply()
sys.meta_path.insert(0, Trigger())
import_both()
assert not any(type(finder).__name__ == "Trigger" for finder in sys.meta_path)
assert_patched()
eagle3compat.restore()
assert_as_shipped()
"""

THREADS = """
threads = [threading.Thread(target=step) for step in (eagle3compat.apply,) * 4 + (import_both,) * 2]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert_patched()
eagle3compat.restore()
assert_as_shipped()
"""

FAILING_SHIM = """
import dataclasses
from eagle3compat.applying import PatchError
from eagle3compat.shim import Patch
import eagle3compat.shims.two_phase_step as broken
def fail(module, patcher):
    raise LookupError("no such thing")
broken.SHIM = dataclasses.replace(broken.SHIM, patches=(Patch(GENERATOR, fail),))
eagle3compat.apply()
for attempt in range(3):
    try:
        from speculators.data_generation import VllmHiddenStatesGenerator
    except PatchError as error:
        assert "two-phase-step" in str(error) and "no such thing" in str(error)
    else:
        raise AssertionError("a generator that is not patched came out of a failed shim")
eagle3compat.restore()
assert_as_shipped()
try:
    eagle3compat.apply()
except PatchError:
    assert_as_shipped()
else:
    raise AssertionError("apply() went on after a failed shim")
"""

STALE = """
from speculators.data_generation.custom_worker import _patched_forward
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    eagle3compat.apply()
assert any("__main__._patched_forward" in str(warning.message) for warning in caught), caught
assert any("__main__._patched_forward" in name for name in eagle3compat.status().stale)
"""

RELOADED = """
eagle3compat.apply()
generator, worker = import_both()
importlib.reload(worker)
importlib.reload(generator)
assert_patched()
eagle3compat.restore()
assert_as_shipped()
importlib.reload(generator)
assert_as_shipped()
"""

PATCHED_OVER = """
eagle3compat.apply()
generator, worker = import_both()
generator.Scheduler = theirs = object()
assert eagle3compat.status().displaced == (GENERATOR + ".Scheduler",)
assert eagle3compat.restore() == (GENERATOR + ".Scheduler",)
assert generator.Scheduler is theirs
"""

FORKED = """
import os
from eagle3compat import plugin
eagle3compat.apply()
import_both()
child = os.fork()
if child == 0:
    try:
        plugin.carry_out_in_worker()
        assert_patched()
    except BaseException:
        import traceback; traceback.print_exc(); os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

SCRIPTS = {
    "half-imported": HALF_IMPORTED,
    "threads": THREADS,
    "failing shim": FAILING_SHIM,
    "stale reference": STALE,
    "reloaded": RELOADED,
    "patched over": PATCHED_OVER,
    "forked": FORKED,
} | {
    order: f'for step in "{order}": STEPS[step]()\n'
    + ("assert_patched()" if order.rstrip("I").endswith("A") else "assert_as_shipped()")
    for order in ORDERS
}


FORKS = """
import json, os, sys, traceback
import vllm.config, vllm.sampling_params, vllm.v1.core.sched.scheduler, vllm.v1.structured_output
import vllm.v1.executor.multiproc_executor, speculators
assert not [name for name in sys.modules if name.startswith("speculators.data_generation")]
outcomes = {}
for name, script in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            namespace = vars(sys.modules["__main__"])
            exec(compile(script, name, "exec"), namespace)
            failure = ""
        except BaseException:
            failure = traceback.format_exc()
        os.write(writer, failure[-30000:].encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        outcomes[name] = said.read()
    os.waitpid(child, 0)
print("OUTCOMES" + json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """The traceback of each script, empty where it ran to its end."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps({name: PRELUDE + script for name, script in SCRIPTS.items()}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.rpartition("OUTCOMES")[2])
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_modules_are_patched_or_as_shipped(failures: dict[str, str], name: str) -> None:
    assert failures[name] == ""
