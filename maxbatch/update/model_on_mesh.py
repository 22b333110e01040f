"""A model on its mesh: shardings of activations, the pipeline, and the order of layers."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from maxbatch.config.combined import DecoderConfig
from maxbatch.config.sections import MeshConfig
from maxbatch.model.eight_bits import check_platform
from maxbatch.model.loss import token_logprobs
from maxbatch.model.walk import LayerRunner
from maxbatch.parallel.pipeline import make_pipeline
from maxbatch.parallel.sharding import activation_constraint
from maxbatch.parallel.trees import State
from maxbatch.update.state import ModelMaker, abstract_model, with_layers


class ModelOnMesh:
    """A model prepared for programs on a mesh.

    Outside the pipeline, its devices share the rows of the embedding and of the loss.

    Args:
      make_model: makes a user's model, which replaces the config's.

    Attributes:
      row_shards: shards of the rows.
      constrain: places activations.
      has_pipeline: whether the layers run in stages.

    Raises:
      ConfigError: the devices cannot compute the stated `attention` or `quantization`, or a user's
        model cannot be trained.
    """

    def __init__(
        self,
        config: DecoderConfig,
        axes: MeshConfig,
        mesh: Mesh,
        batch_axes: tuple[str, ...],
        make_model: ModelMaker | None = None,
    ) -> None:
        row_axes = (*batch_axes, "pipeline")
        self.row_shards = math.prod(mesh.shape[axis] for axis in row_axes)
        self.constrain = activation_constraint(mesh, row_axes)
        check_platform(config.quantization, self.constrain.platform)
        self._config, self._make_model = config, make_model
        self._pipeline = make_pipeline(axes, config.remat, mesh, batch_axes)
        self.has_pipeline = self._pipeline is not None
        self._graphdef, self.abstract = self._split(self._pipeline)

    def _split(self, layer_runner: LayerRunner | None) -> tuple[nnx.GraphDef[nnx.Module], State]:
        return abstract_model(self._config, self.constrain, layer_runner, self._make_model)

    def staged(self, params: State) -> State:
        """Returns parameters in the running order of the layers."""
        return with_layers(params, self._pipeline.stage_order) if self._pipeline else params

    def unstaged(self, params: State) -> State:
        """Returns parameters, or their gradients, back in the order of the layers."""
        return with_layers(params, self._pipeline.layer_order) if self._pipeline else params

    def module(self, staged: State, layer_runner: LayerRunner | None = None) -> Any:
        """Returns the model with `staged` parameters; `layer_runner` replaces the pipeline."""
        graphdef = self._split(layer_runner)[0] if layer_runner else self._graphdef
        return nnx.merge(graphdef, staged)

    def token_logprobs(
        self, params: State, tokens_MxL: jax.Array, segments_MxL: jax.Array
    ) -> jax.Array:
        """Returns the log-probability of each token of rows given those before it, float32[M, L]; 0
        at the first token of a row.

        The model is the config's.

        Args:
          params: parameters in the order of the layers.
          tokens_MxL: int32.
          segments_MxL: int32, 1.. per document within a row, 0 at padding.
        """
        decoder = self.module(self.staged(params))
        return token_logprobs(
            decoder, tokens_MxL, segments_MxL, batch_shards=self.row_shards
        ).logprobs_MxL
