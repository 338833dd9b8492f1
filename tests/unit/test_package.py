"""The public face stays what it is, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

FACE = """
import importlib, pkgutil
import eagle3compat
before = {name: getattr(eagle3compat, name) for name in eagle3compat.__all__}
for info in pkgutil.walk_packages(eagle3compat.__path__, "eagle3compat."):
    # What the checkpoint's files need is no part of this package, and scripts run when imported.
    if ".remote." not in info.name and not info.name.endswith("__main__"):
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            assert error.name.partition(".")[0] in ("numpy", "torch", "safetensors"), error
assert all(getattr(eagle3compat, name) is value for name, value in before.items())
"""


def test_no_submodule_takes_the_place_of_a_public_function() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FACE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
