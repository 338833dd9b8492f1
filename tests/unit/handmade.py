"""Small packages written to disk, laid out as installed wheels are."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from eagle3compat.cache import FactsCache
from eagle3compat.facts import Facts
from eagle3compat.installed import Build
from eagle3compat.sources import Source, open_source

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"


def write_package(folder: Path, texts: Mapping[str, str]) -> Path:
    """Write modules by dotted name; a name with submodules becomes a package."""
    for module, text in texts.items():
        is_package = "." not in module or any(other.startswith(f"{module}.") for other in texts)
        path = folder.joinpath(*module.split("."))
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in file.relative_to(folder).parents:
            if parent.name:
                init = folder / parent / "__init__.py"
                if not init.exists():
                    init.write_text("")
        file.write_text(text)
    return folder


def install(folder: Path, distribution: str, version: str, texts: Mapping[str, str]) -> Path:
    """Write a package with the metadata and RECORD that an installer leaves."""
    write_package(folder, texts)
    package = next(iter(texts)).partition(".")[0]
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    rows = []
    for file in sorted((folder / package).rglob("*.py")):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest())
        name = file.relative_to(folder).as_posix()
        rows.append(f"{name},sha256={digest.rstrip(b'=').decode()},{file.stat().st_size}")
    (metadata / "RECORD").write_text("\n".join(rows) + "\n")
    return folder


def write_wheel(folder: Path, distribution: str, version: str, texts: Mapping[str, str]) -> Path:
    """Write a wheel with the given modules."""
    tree = install(folder / "tree", distribution, version, texts)
    wheel = folder / f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(tree.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(tree).as_posix())
    return wheel


def read(
    folder: Path, vllm: Mapping[str, str], speculators: Mapping[str, str] | None = None
) -> Facts:
    """Facts of hand-made packages, without a cache."""
    sources: list[Source] = [open_source(write_package(folder / "vllm-tree", vllm), "vllm")]
    if speculators is not None:
        tree = write_package(folder / "speculators-tree", speculators)
        sources.append(open_source(tree, "speculators"))
    return Facts(*sources, cache=FactsCache(None))


class EditedSource:
    """A source with the texts of some modules replaced; an empty text removes the module."""

    def __init__(self, source: Source, texts: Mapping[str, str]) -> None:
        self._source = source
        self._texts = texts

    @property
    def build(self) -> Build:
        return self._source.build

    def text(self, module: str) -> str | None:
        return self._texts.get(module, self._source.text(module) or "") or None

    def has_text(self, module: str) -> bool:
        return bool(self._texts.get(module, "x")) and (
            module in self._texts or self._source.has_text(module)
        )

    def is_package(self, module: str) -> bool:
        return self._source.is_package(module)

    def is_opaque(self, module: str) -> bool:
        return self._source.is_opaque(module)

    def location(self, module: str) -> str:
        return self._source.location(module)

    def fingerprint(self, module: str) -> str | None:
        return None if module in self._texts else self._source.fingerprint(module)

    def modules(self) -> Iterator[str]:
        yield from self._source.modules()
        yield from (each for each in self._texts if not self._source.has_text(each))

    def metadata(self) -> str:
        return self._source.metadata()
