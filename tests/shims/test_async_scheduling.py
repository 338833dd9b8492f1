"""async-scheduling: vLLM's scheduler stays synchronous."""

from __future__ import annotations

import pytest
from probing import CONFIGURE_BY_HAND, GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.async_scheduling import SHIM

CONFIG = "vllm.config.scheduler"
FIELD = "async_scheduling: bool = Field(default=None)"


def test_needed_where_the_config_has_the_field(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    line = installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
    assert "SchedulerConfig(" in line


def test_needed_for_the_later_speculators_too(later: Builds) -> None:
    assert later.probe(SHIM).status is Status.NEEDED


def test_not_needed_where_the_config_has_no_such_field(installed: Builds) -> None:
    finding = installed.edited(CONFIG, FIELD, "overlapped: bool = Field(default=None)").probe(SHIM)
    assert finding.status is Status.NOT_NEEDED


def test_drift_where_the_config_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.without(CONFIG),
        installed.without_text(CONFIG),
        installed.garbled(CONFIG),
        installed.edited(CONFIG, "class SchedulerConfig:", "class SchedulingConfig:"),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        CONFIGURE_BY_HAND[1:],
        ("scheduler_config=SchedulerConfig(", "scheduler_config=make_scheduler_config("),
        ("max_num_seqs=max_num_seqs,", "max_num_seqs=max_num_seqs,\n async_scheduling=True,"),
    ],
)
def test_drift_where_the_call_site_was_edited(installed: Builds, old: str, new: str) -> None:
    assert installed.edited(GENERATOR, old, new).probe(SHIM).status is Status.DRIFT


def test_the_config_is_made_with_asynchronous_scheduling_off() -> None:
    config = Recorder("made")
    module = module_with(GENERATOR, SchedulerConfig=config)
    with carried_out(module, SHIM.id):
        assert module.SchedulerConfig(max_num_seqs=4) == "made"
    assert config.keywords == {"max_num_seqs": 4, "async_scheduling": False}


def test_two_shims_add_to_one_config() -> None:
    config = Recorder()
    module = module_with(GENERATOR, SchedulerConfig=config)
    with carried_out(module, SHIM.id, "encoder-decoder-field"):
        module.SchedulerConfig(max_num_seqs=4)
    assert config.keywords == {
        "max_num_seqs": 4,
        "async_scheduling": False,
        "is_encoder_decoder": False,
    }
