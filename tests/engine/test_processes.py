"""The plan reaches vLLM's workers, is heard from them, and reaches nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stock_engine
from running import Run, run_script

pytestmark = pytest.mark.engine

LOAD_PLUGINS = """
import json, os, sys
{before}
from vllm.plugins import load_general_plugins
load_general_plugins()
from eagle3compat import applying
json.dump(
    {{
        "applied": applying.status().applied,
        "shims": [name for name in sys.modules if name.startswith("eagle3compat.shims")],
    }},
    open(sys.argv[1], "w"),
)
"""

APPLY_AND_START = """
import json, os, subprocess, sys
import eagle3compat
eagle3compat.apply()
subprocess.run([sys.executable, "-c", {child!r}, sys.argv[1]], check=True)
"""

SHUT_OUT = """
import json, os, sys
import eagle3compat
from eagle3compat.errors import Refusal
if not {late}:
    os.environ["VLLM_PLUGINS"] = "another_plugin"
try:
    eagle3compat.apply()
    from speculators.data_generation import VllmHiddenStatesGenerator
    os.environ["VLLM_PLUGINS"] = "another_plugin"
    from vllm.v1.executor.multiproc_executor import WorkerProc
    WorkerProc.make_worker_process = None
    VllmHiddenStatesGenerator({model!r}, layer_ids=[2, 4])
except Refusal as error:
    json.dump(str(error), open(sys.argv[1], "w"))
"""


def test_the_plugin_does_nothing_where_no_parent_applied(run_python: Run) -> None:
    outcome = run_python("-c", LOAD_PLUGINS.format(before=""))
    assert outcome == {"applied": False, "shims": []}


def test_the_plugin_does_nothing_where_the_variable_leaked_from_a_stranger(
    run_python: Run,
) -> None:
    leak = (
        "from eagle3compat.payload import Payload\n"
        "os.environ['EAGLE3COMPAT_PLAN'] = "
        "Payload('0.1.0', 2**22 + 1, ('two-phase-step',), '/', '/').to_json()"
    )
    outcome = run_python("-c", LOAD_PLUGINS.format(before=leak))
    assert outcome == {"applied": False, "shims": []}


def test_a_child_of_an_applying_process_carries_the_plan_out(run_python: Run) -> None:
    child = LOAD_PLUGINS.format(before="")
    outcome = run_python("-c", APPLY_AND_START.format(child=child))
    assert outcome["applied"]
    assert "eagle3compat.shims.two_phase_step" in outcome["shims"]


@pytest.mark.parametrize("late", [False, True])
def test_an_allow_list_that_shuts_the_plugin_out_is_refused_before_the_engine(
    run_python: Run, kimi: Path, late: bool
) -> None:
    message = run_python("-c", SHUT_OUT.format(late=late, model=str(kimi)))
    assert "VLLM_PLUGINS" in message
    assert "Add eagle3compat to VLLM_PLUGINS" in message


def test_a_worker_without_its_shims_is_refused() -> None:
    from eagle3compat.errors import Refusal
    from eagle3compat.handshake import check_reports

    reports: list[dict[str, Any]] = [
        {"pid": 1, "live": ["layer-order", "request-order"], "settled": {}},
        {"pid": 2, "live": ["layer-order"], "settled": {}},
    ]
    check_reports(("layer-order",), reports)
    with pytest.raises(Refusal, match=r"worker 1 \(pid 2\).*request-order"):
        check_reports(("layer-order", "request-order"), reports)


def test_plain_vllm_in_the_same_environment_behaves_as_stock(kimi: Path, tmp_path: Path) -> None:
    outcomes = []
    for allowed in (None, ""):
        out = tmp_path / f"outcome-{allowed}.json"
        environment = {} if allowed is None else {"VLLM_PLUGINS": allowed}
        done = run_script(stock_engine.__file__, kimi, out, environment=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        outcomes.append(json.loads(out.read_text()))
    with_plugin, without = outcomes
    assert with_plugin["generated"] == without["generated"]
    assert with_plugin["worker"]["shims"] == without["worker"]["shims"] == []
    assert with_plugin["worker"]["plugin"]
    assert not without["worker"]["plugin"]
