"""What a build's metadata asks of the other builds, and which of that is not met."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from eagle3compat.installed import Build


def unmet(metadata: str, builds: Iterable[Build]) -> Iterator[tuple[str, Build]]:
    """Requirements on the given builds that their versions do not meet.

    Args:
        metadata: text of a METADATA or PKG-INFO.
        builds: the builds that requirements are held against, by name of their package.
    """
    by_name = {build.package: build for build in builds}
    for line in metadata.split("\n\n", 1)[0].splitlines():
        if not line.startswith("Requires-Dist: "):
            continue
        try:
            requirement = Requirement(line.removeprefix("Requires-Dist: "))
            build = by_name.get(canonicalize_name(requirement.name))
            if build is None or build.version is None or not _applies(requirement):
                continue
            # A pin such as torch==2.10.0+cpu names a variant of a version, which is not asked here.
            wanted = SpecifierSet(re.sub(r"\+[\w.]+", "", str(requirement.specifier)))
            if not wanted.contains(Version(build.version).public, prereleases=True):
                yield f"{requirement.name}{requirement.specifier}", build
        except (InvalidRequirement, InvalidSpecifier, InvalidVersion):
            continue  # Metadata of others may be malformed; it only makes a note here.


def _applies(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is None or ("extra" not in str(marker) and marker.evaluate())
