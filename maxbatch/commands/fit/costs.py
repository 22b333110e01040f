"""The modelled time of an update, by which `fit` ranks the ways to reach a batch.

It compares three times per device: arithmetic at the bfloat16 peak, memory traffic at the HBM's bandwidth, and
collective bytes at that of ICI (and of DCN, if an axis spans slices). An update takes at least the longest of them;
the ranking is by that, and among equals by their sum. Launch overheads, the shapes of products and imperfect overlap
are left out: the model ranks alternatives and does not predict seconds.
"""

from __future__ import annotations

import dataclasses
import math

from ml_collections import ConfigDict

from maxbatch.data.feed.placement import BatchShape
from maxbatch.model.decoder import model_flops_per_token
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.system.chips import Chip

# Passes over the layers' weights per micro-batch: forward, backward, and forward again if nothing was kept.
_PASSES = {"none": 2, "minimal": 2, "full": 3}
# Arithmetic relative to none recomputed: of 3 parts (1 forward, 2 backward) the forward one is done again.
_RECOMPUTE = {"none": 1.0, "minimal": 1.0, "full": 4 / 3}


@dataclasses.dataclass(frozen=True)
class Cost:
    """The seconds of one update on one device, by kind."""

    compute_s: float
    memory_s: float
    collectives_s: float

    @property
    def step_s(self) -> float:
        """The longest time; the others hide behind it."""
        return max(self.compute_s, self.memory_s, self.collectives_s)

    @property
    def rank(self) -> tuple[float, float]:
        """The order of alternatives: smaller is better."""
        return self.step_s, self.compute_s + self.memory_s + self.collectives_s


def cost(
    config: ConfigDict, mesh: MeshShape, chip: Chip, shape: BatchShape, num_parameters: int, temp_bytes: int
) -> Cost:
    """Returns the modelled times of one update.

    `temp_bytes` are the temporaries of a device, written and read once per pass; `num_parameters` are of the whole
    model.
    """
    axes, (micro_batch, micro_batches) = mesh.sizes, shape
    devices = math.prod(axes.values())
    tokens = micro_batch * micro_batches * config.max_target_length
    passes, value = _PASSES[config.remat_policy], 2 if config.dtype == "bfloat16" else 4
    weight = 2 if config.weight_dtype == "bfloat16" else 4
    # A pipeline's fill and drain waste (S - 1) / (M R + S - 1) of its ticks.
    stages = axes["pipeline"]
    parts = stages if config.num_pipeline_microbatches == -1 else config.num_pipeline_microbatches
    ticks = parts * config.num_pipeline_repeats
    busy = ticks / (ticks + stages - 1)
    flops = tokens * model_flops_per_token(config) * _RECOMPUTE[config.remat_policy] / devices / busy

    held = num_parameters / (axes["tensor"] * axes["pipeline"])  # parameters that one device computes with
    shard = held / axes["fsdp"]
    # The weights at every pass, the gradient sums per micro-batch (two reads, one write), and the optimizer once.
    traffic = micro_batches * (held * value * (passes + 1) + shard * 3 * 4 + 2 * temp_bytes)
    traffic += shard * 4 * 2 * weight

    fsdp = _ring(axes["fsdp"])
    # Weights are gathered at every pass, gradients scattered once per micro-batch.
    weights = micro_batches * held * fsdp * (passes * value + weight)
    gradients = shard * weight * 2 * _ring(axes["data"])  # once per update
    rows = micro_batch / mesh.batch_shards * config.max_target_length / axes["context"]
    stream = rows * config.base_emb_dim * value * config.base_num_decoder_layers / stages
    # Two sums over the tensor axis per layer and pass; keys and values are gathered over the context axis.
    sums = 4 * _ring(axes["tensor"]) + 2 * _ring(axes["context"])
    activations = micro_batches * stream * (passes + 1) * sums
    over = {"data": gradients, "fsdp": weights, "tensor": activations}
    dcn_bytes = sum(size * _ring(mesh.dcn[axis]) for axis, size in over.items())
    collectives = sum(over.values()) / (chip.ici_gb_s * 1e9) + dcn_bytes / (chip.dcn_gb_s * 1e9)
    return Cost(flops / (chip.tflops * 1e12), traffic / (chip.hbm_gb_s * 1e9), collectives)


def _ring(devices: int) -> float:
    """Returns the share of an array that a device receives when a ring of devices gathers or scatters it."""
    return (devices - 1) / devices
