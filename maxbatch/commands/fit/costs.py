"""What an update should take on a chip of public figures: the model by which the ways to reach a batch are ranked.

Three times per device: arithmetic against the bfloat16 peak, memory traffic against the HBM's bandwidth, collective
bytes against ICI (and DCN, where an axis spans slices). An update takes at least the longest of them, if the others
hide behind it; the ranking is by that, and by their sum among equals. Launch overheads, the shape of products and how
well the compiler overlaps are left out: the model orders alternatives, it does not promise seconds.
"""

from __future__ import annotations

import dataclasses
import math

from ml_collections import ConfigDict

from maxbatch.model.decoder import model_flops_per_token
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.system.chips import Chip

# Passes over the layers' weights per micro-batch (forward, backward, and again forward where nothing was kept).
_PASSES = {"none": 2, "minimal": 2, "full": 3}
# Arithmetic against that without recomputation: of 3 parts (1 forward, 2 backward) the forward one is done again.
_RECOMPUTE = {"none": 1.0, "minimal": 1.0, "full": 4 / 3}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one update on one device, by what they are spent on."""

    compute_s: float
    memory_s: float
    collectives_s: float

    @property
    def step_s(self) -> float:
        """The longest: the others hide behind it."""
        return max(self.compute_s, self.memory_s, self.collectives_s)

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better."""
        return self.step_s, self.compute_s + self.memory_s + self.collectives_s


def cost(
    config: ConfigDict,
    mesh: MeshShape,
    chip: Chip,
    micro_batch: int,
    micro_batches: int,
    num_parameters: int,
    temp_bytes: int,
) -> Cost:
    """Return what one update costs.

    Args:
      config: the model, its dtypes and `remat_policy`.
      mesh: the axes.
      chip: its figures.
      micro_batch: rows of one pass, over all devices.
      micro_batches: passes of an update.
      num_parameters: of the whole model.
      temp_bytes: temporaries of a device, written and read once per pass.
    """
    axes = mesh.sizes
    devices = math.prod(axes.values())
    tokens = micro_batch * micro_batches * config.max_target_length
    passes, value = _PASSES[config.remat_policy], 2 if config.dtype == "bfloat16" else 4
    weight = 2 if config.weight_dtype == "bfloat16" else 4
    # What the pipeline's fill and drain waste: (S - 1) / (M R + S - 1).
    stages = axes["pipeline"]
    parts = stages if config.num_pipeline_microbatches == -1 else config.num_pipeline_microbatches
    ticks = parts * config.num_pipeline_repeats
    busy = ticks / (ticks + stages - 1)
    flops = tokens * model_flops_per_token(config) * _RECOMPUTE[config.remat_policy] / devices / busy

    held = num_parameters / (axes["tensor"] * axes["pipeline"])  # parameters that a device computes with
    shard = held / axes["fsdp"]
    # Weights of every pass, gradients added up per micro-batch (read, read, written), and once the optimizer.
    traffic = micro_batches * (held * value * (passes + 1) + shard * 3 * 4 + 2 * temp_bytes)
    traffic += shard * 4 * 2 * weight

    fsdp = _ring(axes["fsdp"])
    weights = (
        micro_batches * held * fsdp * (passes * value + weight)
    )  # gathered per pass, gradients scattered
    gradients = shard * weight * 2 * _ring(axes["data"])  # once per update
    rows = micro_batch / mesh.batch_shards * config.max_target_length / axes["context"]
    stream = rows * config.base_emb_dim * value * config.base_num_decoder_layers / stages
    # Two sums over the tensor axis per layer and pass; keys and values go round the context axis.
    activations = (
        micro_batches * stream * (passes + 1) * (4 * _ring(axes["tensor"]) + 2 * _ring(axes["context"]))
    )
    over = {"data": gradients, "fsdp": weights, "tensor": activations}
    dcn_bytes = sum(size * _ring(mesh.dcn[axis]) for axis, size in over.items())
    collectives = sum(over.values()) / (chip.ici_gb_s * 1e9) + dcn_bytes / (chip.dcn_gb_s * 1e9)
    return Cost(flops / (chip.tflops * 1e12), traffic / (chip.hbm_gb_s * 1e9), collectives)


def _ring(devices: int) -> float:
    """The share of an array that a device receives when a ring of so many gathers or scatters it."""
    return (devices - 1) / devices
