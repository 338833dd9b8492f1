"""prefix-caching: every token of every prompt is computed."""

from __future__ import annotations

import pytest
from probing import CONFIGURE_BY_HAND, GENERATOR, Builds
from standins import Recorder, carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.prefix_caching import SHIM

CONFIG = "vllm.config.cache"


def test_needed_where_it_is_left_on(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    assert "CacheConfig(" in installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]


def test_not_needed_where_the_consumer_turns_it_off(later: Builds) -> None:
    assert later.probe(SHIM).status is Status.NOT_NEEDED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        CONFIGURE_BY_HAND[1:],
        ("cache_config = CacheConfig(", "cache_config = make_cache_config("),
        ("block_size=VLLM_BLOCK_SIZE,", "block_size=VLLM_BLOCK_SIZE, enable_prefix_caching=True,"),
    ],
)
def test_drift_where_the_call_site_was_edited(installed: Builds, old: str, new: str) -> None:
    assert installed.edited(GENERATOR, old, new).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_config_cannot_be_read_or_has_no_such_field(installed: Builds) -> None:
    for builds in (
        installed.without(CONFIG),
        installed.without_text(CONFIG),
        installed.garbled(CONFIG),
        installed.edited(CONFIG, "enable_prefix_caching: bool = True", "reuse_blocks: bool = True"),
        installed.without(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_the_config_is_made_with_prefix_caching_off() -> None:
    config = Recorder("made")
    module = module_with(GENERATOR, CacheConfig=config)
    with carried_out(module, SHIM.id):
        assert module.CacheConfig(block_size=16) == "made"
    assert config.keywords == {"block_size": 16, "enable_prefix_caching": False}
