"""The flags of a Ray cluster, without a cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest

from maxbatch.cli import main
from maxbatch.system.processes.ray_cluster import shared_variables
from tests.helpers.sweeps import RATES, write_sweep


def test_tasks_share_config_keys_and_the_access_to_buckets_but_no_files_of_the_machine() -> None:
    shared = {
        "MAXBATCH_STEPS": "3",
        "FSSPEC_S3": "{}",
        "AWS_ENDPOINT_URL": "http://there",
        "AWS_SESSION_TOKEN": "secret",
        "STORAGE_EMULATOR_HOST": "http://there",
    }
    own = {
        "AWS_PROFILE": "mine",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
        "PATH": "/bin",
    }
    assert shared_variables(shared | own) == shared


def test_without_ray_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["sweep", write_sweep(RATES), "--ray", "local"]) == 2
    assert (
        capsys.readouterr().err
        == "maxbatch: error: --ray needs Ray; works: pip install 'maxbatch[ray]'\n"
    )


def test_ray_is_imported_only_where_the_flag_is_given() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nimport maxbatch.commands.sweep, "
        "maxbatch.commands.prepare, maxbatch.around.child_runs.remote_training"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
