"""encoder-decoder-field: SchedulerConfig's field that became required."""

from __future__ import annotations

import pytest
from probing import GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.encoder_decoder_field import SHIM

CONFIG = "vllm.config.scheduler"
FIELD = "is_encoder_decoder: InitVar[bool]\n"


def test_needed_where_the_field_is_required(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert "is_encoder_decoder" in finding.reason
    line = installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
    assert "SchedulerConfig(" in line


@pytest.mark.parametrize("new", ["is_encoder_decoder: InitVar[bool] = False\n", "\n"])
def test_not_needed_where_the_field_has_a_default_or_is_gone(installed: Builds, new: str) -> None:
    assert installed.edited(CONFIG, FIELD, new).probe(SHIM).status is Status.NOT_NEEDED


def test_not_needed_where_the_consumer_gives_it(installed: Builds, later: Builds) -> None:
    giving = installed.edited(
        GENERATOR, "max_num_seqs=max_num_seqs,", "max_num_seqs=max_num_seqs, is_encoder_decoder=0,"
    )
    assert giving.probe(SHIM).status is Status.NOT_NEEDED
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_another_field_became_required_as_well(installed: Builds) -> None:
    finding = installed.edited(
        CONFIG, "async_scheduling: bool = Field(default=None)", "async_scheduling: bool"
    ).probe(SHIM)
    assert finding.status is Status.DRIFT
    assert "async_scheduling" in finding.reason


def test_drift_where_a_field_that_the_consumer_gives_was_renamed(installed: Builds) -> None:
    finding = installed.edited(CONFIG, "max_num_seqs: int =", "max_sequences: int =").probe(SHIM)
    assert finding.status is Status.DRIFT
    assert "max_num_seqs" in finding.reason


def test_drift_where_the_config_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.without(CONFIG),
        installed.without_text(CONFIG),
        installed.garbled(CONFIG),
        installed.edited(CONFIG, "class SchedulerConfig:", "class SchedulingConfig:"),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_drift_where_the_consumer_passes_what_text_cannot_show(installed: Builds) -> None:
    starred = installed.edited(GENERATOR, "max_num_seqs=max_num_seqs,", "**options,")
    assert starred.probe(SHIM).status is Status.DRIFT


def test_the_config_is_made_without_an_encoder() -> None:
    config = Recorder("made")
    module = module_with(GENERATOR, SchedulerConfig=config)
    with carried_out(module, SHIM.id):
        assert module.SchedulerConfig(max_num_seqs=4) == "made"
    assert config.keywords == {"max_num_seqs": 4, "is_encoder_decoder": False}


def test_what_the_caller_says_stands() -> None:
    config = Recorder()
    module = module_with(GENERATOR, SchedulerConfig=config)
    with carried_out(module, SHIM.id):
        module.SchedulerConfig(is_encoder_decoder=True)
    assert config.keywords == {"is_encoder_decoder": True}
