"""Comparison of hosts at the start of a run: config, versions, run folder and content of inputs.

The config comes first, before anything in which hosts could differ in number or order. A single
host skips all this, and nothing is read that the run does not read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping

import jax

from maxbatch.parallel.agreement import check_agreed
from maxbatch.parallel.hosts import broadcast, gather, is_first
from maxbatch.parallel.jax_settings import settings_in_force
from maxbatch.run.compile.saved import versions
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.folder.run_id import RunIdentity
from maxbatch.system.errors import ConfigError, one_line

# Packages besides those of the compiler (`versions`) that make rows, random numbers or tokens.
_PACKAGES = ("numpy", "ml_dtypes", "grain", "tokenizers", "sentencepiece")


def check_same_start(command: str, config_facts: Mapping[str, str]) -> None:
    """Checks that all hosts start the same command with the same config, versions and devices.

    Args:
      config_facts: the config (`facts_of`) before `flags_in_force`, which compares the flags of the
        TPU's compiler itself, and a user's own parts of the run by their argument.

    Raises:
      ConfigError: some differ; the message names each, with values and hosts.
    """
    if jax.process_count() > 1:
        facts = {"command": command} | dict(config_facts) | _machine()
        check_agreed(facts, "start all hosts with the same config, on the same versions")


def _machine() -> dict[str, str]:
    """Returns the software of a host, and its devices."""
    devices = jax.local_devices()
    return software_of(devices[0]) | {
        "devices of the host": f"{len(devices)} x {devices[0].device_kind}"
    }


def software_of(device: jax.Device) -> dict[str, str]:
    """Returns the versions and settings by which programs, random numbers or data may differ."""
    software = versions(device.platform)
    software.pop("cpu", None)  # every host compiles for its own CPU
    software["source of maxbatch"] = software.pop("source")
    software["maxbatch"] = importlib.metadata.version("maxbatch")
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            software[package] = importlib.metadata.version(package)
    if device.platform != "cpu":
        software["driver"] = one_line(device.client.platform_version)
    return software | settings_in_force(device.platform)


def share_folder(folder: RunFolder) -> RunIdentity:
    """Checks that all hosts see the first host's folder; returns the identity of the run.

    Raises:
      ConfigError: a host sees another folder, or none.
    """
    if jax.process_count() > 1:
        told = RunIdentity(**broadcast(lambda: folder.start_together().__dict__))
        sees = is_first() or folder.join(told)
        others = [
            (host, path)
            for host, path in enumerate(gather(None if sees else str(folder.path.absolute())))
            if path
        ]
        if others:
            hosts, paths = zip(*others, strict=True)
            raise ConfigError(
                f"run_dir={folder.path}: must be one folder that all hosts see, and host "
                f"{', '.join(map(str, hosts))} does not see the one of host 0 (it looked in "
                f"{paths[0]}); give a folder of a network file system or of an object store"
            )
    assert folder.identity is not None, "the hosts have found it"
    return folder.identity
