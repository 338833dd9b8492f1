"""The text of a package's modules in a wheel or an sdist.

Nothing is executed, nothing is extracted. Archives come from elsewhere: the names of their members
are only compared, never used as paths, and their sizes are counted while reading, never believed.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from eagle3compat.errors import InputError
from eagle3compat.installed import (
    Build,
    commit_from_texts,
    commit_from_version,
    parse_name_and_version,
    version_from_texts,
)
from eagle3compat.sources import decode, module_name

MAX_MODULE_BYTES = 8 * 2**20
"""No module of vLLM, transformers or torch comes near: torch's largest has 1.5 MB."""
MAX_MEMBERS = 200_000
MAX_SDIST_BYTES = 512 * 2**20
"""What an sdist may unpack to in all; vLLM's has about 100 MB."""
MAX_SDIST_TEXT_BYTES = 96 * 2**20

_VERSION_MODULES = ("_version", "version", "commit_id")


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
            return decode(self._reader.read(member))
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
                yield module_name(PurePosixPath(name[len(self._prefix) :]))

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
        texts = [decode(self._reader.read(path)) for path in paths if path in self._reader.names]
        version = version or version_from_texts(texts)
        commit = commit_from_version(version) or commit_from_texts(texts)
        package_dir = self._archive / self._prefix / package
        return Build(package, name, version, commit, self._archive, package_dir, kind)

    def metadata(self) -> str:
        names = self._reader.names
        places = [name for name in names if name.endswith(".dist-info/METADATA")]
        places += [name for name in names if name.endswith("PKG-INFO")]
        shallow = sorted((name for name in places if name.count("/") <= 1), key=len)
        return decode(self._reader.read(shallow[0])) if shallow else ""


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
