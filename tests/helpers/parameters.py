"""A model on disk as a test wants it: its config, its graph and its parameters at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from maxbatch.config.config import Config
from maxbatch.run.weights.parameters import open_source, restored


def load_parameters(
    path: str | Path, overrides: Sequence[str] = (), mesh: Mesh | None = None
) -> tuple[Config, nnx.GraphDef[Any], nnx.State]:
    """Returns the config, the model graph and the parameters of a model, on a mesh or the first
    device.
    """
    source = open_source(path)
    config = source.config(overrides)
    return config, *restored(source, config.decoder, mesh)
