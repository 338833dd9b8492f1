"""The records of the shims: complete, in order, true to the consumer's text, and light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import eagle3compat
import eagle3compat.shims
from eagle3compat.errors import BuildNotFoundError
from eagle3compat.installed import find_build
from eagle3compat.probes import function_text
from eagle3compat.shim import Process, Shim, Stage, all_shims, shim
from eagle3compat.sources import FolderSource

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for path in (ROOT / "shims").glob("*.py") if path.stem != "__init__")
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(pull|issues)/\d+")

every_shim = pytest.mark.parametrize("record", all_shims(), ids=lambda record: record.id)
every_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)


def test_the_registry_holds_every_module_of_the_folder_once() -> None:
    ids = [record.id for record in all_shims()]
    assert len(ids) == len(set(ids))
    assert sorted(ids) == sorted(module.stem.replace("_", "-") for module in MODULES)


@every_shim
def test_a_record_says_everything(record: Shim) -> None:
    for text in (record.title, record.why, record.mended_in, record.remove_when):
        assert len(text.split()) >= 2, f"{record.id}: {text!r} says too little"
    assert record.contracts
    assert record.patches
    for contract in record.contracts:
        assert contract.consumer.startswith("speculators.")
        assert "." in contract.provider
        assert len(contract.needs.split()) >= 2


@every_shim
def test_ranges_are_ranges(record: Shim) -> None:
    for text in (record.consumers, record.expected or ">=0", record.transformers or ">=4"):
        assert text, "an empty range would mean every release"
        assert len(SpecifierSet(text)) >= 1
    # The generator is in no other release than these.
    inside = [
        v for v in ("0.2.0", "0.3.0", "0.4.0", "0.5.0") if v in SpecifierSet(record.consumers)
    ]
    assert inside in (["0.3.0"], ["0.4.0"], ["0.3.0", "0.4.0"])


@every_shim
def test_upstream_is_a_thread_or_a_reason_for_none(record: Shim) -> None:
    if record.upstream.startswith("none: "):
        assert len(record.upstream.split()) >= 5, f"{record.id}: {record.upstream!r} is no reason"
    else:
        links = re.findall(r"https?://\S+", record.upstream)
        assert links, f"{record.id}: {record.upstream!r} is no link"
        assert all(THREAD.fullmatch(link) for link in links), (
            f"{record.id}: {record.upstream!r} names a repository, not a pull request or an issue"
        )


@every_shim
def test_shims_that_come_first_exist_and_do(record: Shim) -> None:
    order = [each.id for each in all_shims()]
    for earlier in record.after:
        assert order.index(earlier) < order.index(record.id)


@every_shim
def test_only_the_consumer_is_patched_unless_a_reason_is_given(record: Shim) -> None:
    outside = [module for module in record.modules if not module.startswith("speculators.")]
    assert not outside or record.touches_provider
    assert record.touches_provider is None or len(record.touches_provider.split()) >= 5


@every_shim
def test_the_process_is_that_of_the_patched_modules(record: Shim) -> None:
    """The generator lives in the parent, the worker extension in vLLM's workers."""
    if record.stages == (Stage.TRAINING,):
        assert record.process is Process.PARENT, "nobody trains in vLLM's workers"
        assert record.expected is None, "no vLLM takes part"
        return
    stems = {module.rpartition(".")[2] for module in record.modules}
    if "vllm_hidden_states_generator" in stems:
        assert record.process.in_parent
    if "custom_worker" in stems:
        assert record.process.in_worker
    if stems not in ({"vllm_hidden_states_generator"}, {"custom_worker"}):
        assert record.process is Process.BOTH, "vLLM's workers import speculators too"
    else:
        assert record.process is not Process.BOTH


@every_shim
def test_the_shim_has_a_test_module_of_its_name(record: Shim) -> None:
    module = record.id.replace("-", "_")
    assert (ROOT / "tests" / "shims" / f"test_{module}.py").is_file()


def test_there_is_no_test_module_of_a_shim_that_is_gone() -> None:
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests/shims").glob("test_*.py")}
    assert tested - {"declared_order"} == {module.stem for module in MODULES}


def test_an_unknown_shim_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"no-such-shim.*cpu-rotary"):
        shim("no-such-shim")


@every_shim
def test_call_sites_are_in_the_consumers_text(record: Shim) -> None:
    try:
        build = find_build("speculators")
    except BuildNotFoundError as error:
        pytest.skip(f"needs the text of speculators: {error}")
    if Version(build.version or "0") not in SpecifierSet(record.consumers):
        pytest.skip(f"speculators {build.version} is outside {record.consumers}")
    source = FolderSource(build)
    for contract in record.contracts:
        text = source.text(contract.consumer)
        assert text is not None, f"{contract.consumer} is not there"
        assert function_text(text, contract.within), f"{contract.within} is not in it"
    for module in record.modules:
        if module.startswith("speculators."):
            assert source.text(module) is not None


# --- light ---------------------------------------------------------------------------------------

ALLOWED = {"wrapt", "packaging", "eagle3compat", *sys.stdlib_module_names}


@every_module
def test_a_shim_imports_nothing_but_what_workers_have(module: Path) -> None:
    assert set(_imported(ast.parse(module.read_text()))) <= ALLOWED


def _imported(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that importing a module imports."""
    for node in _executed(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield (node.module or "").partition(".")[0]


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, those in blocks and class bodies too."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _executed(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from _executed(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _executed(handler.body)


CONCERNED = ("torch", "vllm", "speculators", "transformers")
HEAVY = ("griffe", "pydantic", "yaml", "rich", "typer", *CONCERNED)


def test_loading_all_shims_imports_nothing_heavy() -> None:
    assert _loaded_by("from eagle3compat.shim import all_shims; all_shims()") == set()


def test_the_probe_for_heavy_packages_can_fail() -> None:
    assert _loaded_by("import yaml") == {"yaml"}


def test_applying_imports_none_of_the_packages_concerned() -> None:
    for package in ("vllm", "speculators"):
        try:
            find_build(package)
        except BuildNotFoundError as error:
            pytest.skip(f"needs both sides installed: {error}")
    loaded = _loaded_by("import eagle3compat; assert eagle3compat.apply().needed")
    assert loaded.isdisjoint(CONCERNED)


def _loaded_by(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after some code."""
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    path = str(Path(eagle3compat.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
