"""A wheel and an editable install alike hold the shims, the matrix and the checkpoint's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.network

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import importlib.metadata, importlib.resources, json
from eagle3compat.shim import all_shims
files = importlib.resources.files("eagle3compat")
print(json.dumps({
    "shims": len(all_shims()),
    "matrix": files.joinpath("compat_matrix.yaml").read_text(encoding="utf-8").startswith("#"),
    "remote": files.joinpath("tiny", "remote", "tokenization_kimi.py").is_file(),
    "typed": files.joinpath("py.typed").is_file(),
    "plugin": [
        entry.value
        for entry in importlib.metadata.entry_points(group="vllm.general_plugins")
    ],
}))
"""


def _run(*command: str | Path) -> str:
    # Our own variables would have the new interpreter import this checkout.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # By way of an sdist, which has to be whole as well.
    _run(sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_in_a_clean_environment_is_whole(kind: str, wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    uv = (sys.executable, "-m", "uv")
    _run(*uv, "venv", "--quiet", "--python", sys.executable, environment)
    what = ("--editable", ROOT) if kind == "editable" else (wheel,)
    scripts = environment / "bin"
    _run(*uv, "pip", "install", "--quiet", "--python", scripts / "python", *what)
    found = json.loads(_run(scripts / "python", "-c", LOOK))
    assert found == {
        "shims": len(list((ROOT / "shims").glob("[!_]*.py"))),
        "matrix": True,
        "remote": True,
        "typed": True,
        "plugin": ["eagle3compat.plugin:carry_out_in_worker"],
    }
    assert "eagle3compat" in _run(scripts / "eagle3compat", "--version")
    assert "usage" in _run(scripts / "verify-patches", "--help").lower()
    _run(scripts / "eagle3compat", "tiny-kimi", "--help")
