"""An installed TPU library stays silent on a machine without a TPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from maxbatch.parallel import absent_tpu


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which libtpu is installed and nothing else; returns the folder of its PCI
    devices.
    """
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(absent_tpu, "_PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(absent_tpu, "_has_plugins", lambda: False)
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    importlib.invalidate_caches()
    return tmp_path / "pci"


def add_device(folder: Path, device: str) -> None:
    (folder / "0000:00:04.0").mkdir(parents=True)
    (folder / "0000:00:04.0" / "vendor").write_text("0x1ae0\n")
    (folder / "0000:00:04.0" / "device").write_text(f"{device}\n")


def test_jax_does_not_start_an_installed_tpu_library_where_there_is_no_tpu(installed: Path) -> None:
    add_device(installed, "0x0042")  # Google's network card
    absent_tpu.leave_out_absent_tpu()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    "kept", ["a TPU", "another accelerator", "JAX_FORCE_TPU_INIT", "no libtpu"]
)
def test_what_a_machine_has_or_the_user_sets_stays(
    kept: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept == "a TPU":
        add_device(installed, "0x0063")
        assert absent_tpu.tpu_version_here() == "v5e"
    elif kept == "another accelerator":
        monkeypatch.setattr(absent_tpu, "_has_plugins", lambda: True)
    elif kept == "no libtpu":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setenv(kept, "1")
    absent_tpu.leave_out_absent_tpu()
    assert "JAX_PLATFORMS" not in os.environ
