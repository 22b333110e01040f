"""Versions of the software that a run depends on."""

from __future__ import annotations

import importlib.metadata
import platform

# What computes: maxbatch, JAX and its compilers.
_COMPUTING = (
    "maxbatch",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "optax",
)


def computing_versions() -> dict[str, str]:
    """Returns the versions of Python, of maxbatch, and of JAX with its compilers, as far as they
    are installed.
    """
    return {"python": platform.python_version()} | installed(_COMPUTING)


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of those packages that are installed, by name."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
