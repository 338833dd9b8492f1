"""What probes are asked about: the builds that are installed, and a later speculators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packaging.version import Version
from probing import Builds

from eagle3compat import settled
from eagle3compat.errors import BuildNotFoundError, InputError
from eagle3compat.installed import find_build
from eagle3compat.sources import Source, installed_sources, open_source

SPECULATORS = "0.3.0"
VLLM = "0.16.0"
LATER_SPECULATORS = "speculators==0.4.0.1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "later" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.network)


@pytest.fixture(scope="session")
def installed() -> Builds:
    """speculators 0.3.0 and vLLM 0.16.0 as installed; it is their text that tests edit."""
    try:
        consumer, provider = find_build("speculators"), find_build("vllm")
    except BuildNotFoundError as error:
        pytest.skip(f"needs the text of speculators and vLLM: {error}")
    versions = [Version(build.version or "0").base_version for build in (consumer, provider)]
    if versions != [SPECULATORS, VLLM]:
        pytest.skip(
            f"edits the text of speculators {SPECULATORS} and vLLM {VLLM}; "
            f"{consumer.version} and {provider.version} are installed"
        )
    return Builds(installed_sources(consumer, provider))


@pytest.fixture(scope="session")
def _later_source() -> Source:
    try:
        return open_source(LATER_SPECULATORS, "speculators")
    except InputError as error:
        pytest.skip(f"needs the text of {LATER_SPECULATORS}: {error}")


@pytest.fixture
def later(installed: Builds, _later_source: Source) -> Builds:
    """speculators 0.4.0.1 on the installed vLLM."""
    return installed.with_consumer(_later_source)


@pytest.fixture(autouse=True)
def nothing_settled() -> Iterator[None]:
    settled.forget()
    yield
    settled.forget()
