"""What is loaded: nothing of the trainer by a pod, and next to nothing by a session of pytest
without one.
"""

from __future__ import annotations

import subprocess
import sys


def loaded(statement: str) -> set[str]:
    program = (
        f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_pods_load_no_module_of_the_trainer() -> None:
    every = (
        "from maxbatch.testing import run, host, host_session, merging, plugin, pod_test, stacks"
    )
    ours = {name for name in loaded(every) if name.startswith("maxbatch.")}
    assert "maxbatch.testing.hosts" in ours
    assert {name.split(".")[1] for name in ours} == {"registered", "system", "testing"}


def test_a_session_without_pods_loads_the_plugin_alone() -> None:
    found = loaded("import pytest; before = set(sys.modules); import maxbatch.testing.plugin")
    assert {name for name in found if name.startswith("maxbatch")} <= {
        "maxbatch",
        "maxbatch.registered",
        "maxbatch.system",
        "maxbatch.system.errors",
        "maxbatch.system.registry",
        "maxbatch.system.terminal.folding",
        "maxbatch.testing",
        "maxbatch.testing.plugin",
    }
    assert not {"jax", "numpy", "cloudpickle", "multiprocessing"} & found
