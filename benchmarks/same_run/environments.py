"""Virtual environments with another program, made once and found again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measurement import BenchmarkError


class Program(NamedTuple):
    """Another program, and what installs it."""

    title: str
    packages: tuple[str, ...]  # the first is the program; the results state the versions of all
    requirements: tuple[str, ...]  # arguments of `uv pip install`
    python: str  # the version that it needs, as 3.12


PROGRAMS = {
    "maxtext": Program(
        "MaxText",
        ("maxtext", "jax", "flax", "optax"),
        ("maxtext[tpu]==0.2.5", "--resolution=lowest"),
        "3.12",
    ),
    "trl": Program(
        "transformers, TRL",
        ("transformers", "trl", "torch", "peft"),
        ("trl", "transformers", "torch", "peft"),
        "3.11",
    ),
}


class NoPython(BenchmarkError):
    """The Python that a program needs is not on this machine."""


def python_of(program: str, folder: Path) -> Path:
    """Returns the Python of a program's environment `folder/program`, which is made if it is
    missing.

    Raises:
      NoPython: this machine has no Python of the version that the program needs.
      BenchmarkError: the packages cannot be installed.
    """
    place = (folder / program).absolute()
    python = place / "bin" / "python"
    if python.exists() and not (place / "unfinished").exists():
        return python
    stated = PROGRAMS[program]
    base = _interpreter(stated.python)
    place.mkdir(parents=True, exist_ok=True)
    (place / "unfinished").touch()
    run([base, "-m", "venv", place], place / "venv.log")
    run([python, "-m", "pip", "install", "--quiet", "uv"], place / "pip.log")
    run(
        [python, "-m", "uv", "pip", "install", "--python", python, *stated.requirements],
        place / "uv.log",
    )
    (place / "unfinished").unlink()
    return python


def versions(program: str, python: Path) -> dict[str, str]:
    """Returns the versions of a program's packages, and of Python."""
    code = (
        "import sys, importlib.metadata as m; print(*[m.version(p) for p in sys.argv[1:]], "
        "sys.version.split()[0])"
    )
    packages = PROGRAMS[program].packages
    found = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=True
    ).stdout.split()
    return dict(zip([*packages, "python"], found, strict=True))


def run(command: Sequence[str | Path], log: Path) -> None:
    """Runs a command on one CPU device; raises BenchmarkError with the end of its output if it
    fails.
    """
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")
    }
    with open(log, "wb") as output:
        done = subprocess.run(
            list(map(str, command)),
            env={**inherited, "JAX_PLATFORMS": "cpu"},
            cwd=log.parent,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise BenchmarkError(
            f"{command[0]} ended with {done.returncode}:\n{log.read_text(errors='replace')[-2000:]}"
        )


def _interpreter(version: str) -> str:
    wanted = tuple(map(int, version.split(".")))
    if sys.version_info[:2] == wanted:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for place in [
        shutil.which(f"python{version}"),
        *sorted(pyenv.glob(f"{version}.*/bin/python{version}")),
    ]:
        if (
            place
            and not subprocess.run(
                [place, "--version"], capture_output=True, check=False
            ).returncode
        ):
            return str(place)
    raise NoPython(f"Python {version} is not on this machine")
