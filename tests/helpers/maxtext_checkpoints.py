"""Checkpoints as MaxText writes them, made with Orbax from parameters of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxbatch.around.maxtext.checkpoints.names import LAYER_AXIS
from maxbatch.config.config import Config
from maxbatch.parallel.trees import State
from maxbatch.run.weights.parameters import placed
from maxbatch.update.state import abstract_model

Tree = dict[str, Any]


def abstract_params(config: Config) -> State:
    return placed(abstract_model(config.decoder)[1], jax.devices()[0])


def random_like(abstract: State, seed: int = 0) -> State:
    """Returns parameters without structure, so that no transposition of them goes unnoticed."""
    rng = np.random.default_rng(seed)
    params: State = jax.tree.map(
        lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), abstract
    )
    return params


def unscanned(params: Tree) -> Tree:
    """Returns MaxText's parameters with each layer in arrays of its own."""
    decoder = dict(params["decoder"])
    layers = decoder.pop("layers")
    for layer in range(jax.tree.leaves(layers)[0].shape[LAYER_AXIS]):
        decoder[f"layers_{layer}"] = jax.tree.map(
            lambda x, layer=layer: np.take(x, layer, LAYER_AXIS), layers
        )
    return {**params, "decoder": decoder}


def write_checkpoint(
    folder: Path, params: Tree, step: int | None = None, moments: Sequence[Tree] = ()
) -> Path:
    """Writes `checkpoints/STEP/items` of a run folder; returns its path.

    Args:
      params: MaxText's parameters.
      step: the updates of a full state, in a folder of one less; None: parameters alone, in folder
        0.
      moments: Adam's first and second moments, as the parameters.
    """
    tree: Tree = {"params": {"params": params}}
    number = 0 if step is None else step - 1
    if step is not None:
        count = np.int32(step)
        mu, nu = moments
        adam = {"count": count, "mu": {"params": mu}, "nu": {"params": nu}}
        tree |= {"step": count, "opt_state": {"0": adam, "2": {"count": count}}}
        tree["nnx_aux"] = {"model": {"rngs": {"count": np.zeros(2, np.uint32)}}}
    path = folder.absolute() / "checkpoints" / str(number)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
    return path / "items"


def content_of(folder: Path) -> Mapping[str, bytes]:
    """Returns the bytes of every file below a folder, by relative path."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
