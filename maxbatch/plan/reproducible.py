"""Rules of updates that are equal to the last bit (`reproducible_sums`), for a config on its
devices.
"""

from __future__ import annotations

import math

from maxbatch.config.combined import PlanConfig
from maxbatch.config.values import Value
from maxbatch.families.matrices import adapter_size, model_size
from maxbatch.plan.divisors import divisors, nearest_divisor
from maxbatch.plan.mesh_shape import AXES, MeshShape, axis_key
from maxbatch.plan.rampup import RampupBatchManager
from maxbatch.plan.refusal import Refusal
from maxbatch.system.errors import ConfigError

_AXES = ("data", "fsdp")
NUM_DIGITS = 3  # of an exact sum, an int32 each
MOST_ATOMS = 2**17 - 1  # of an update: summands of an exact sum


def whole_bytes(config: PlanConfig) -> int | None:
    """Returns the bytes that every device holds whole: the model, its adapters, and the exact sum of
    the gradient, three integers for each trained value. None without `reproducible_sums`.
    """
    if not config.optimizer.reproducible_sums:
        return None
    weight = 2 if config.model.weight_dtype == "bfloat16" else 4
    model, adapters = model_size(config.model), adapter_size(config.model, config.adapters)
    return model * weight + adapters * 4 + (adapters or model) * 4 * NUM_DIGITS


def check_whole_fits(config: PlanConfig, available_bytes: int | None, device: str) -> None:
    """Raises ConfigError if a device's memory is smaller than what it holds whole.

    Args:
      available_bytes: memory of a device; None: it is not known.
      device: its name, for users.
    """
    needed = whole_bytes(config)
    if needed is None or available_bytes is None or needed <= available_bytes:
        return
    raise ConfigError(
        f"reproducible_sums=true: must be false on {device} ({available_bytes / 1e9:,.2f} GB), since "
        f"every device holds the model and the sums of its gradient whole, {needed / 1e9:,.2f} GB; "
        "works: reproducible_sums=false"
    )


def check_reproducible(config: PlanConfig, mesh: MeshShape, manager: RampupBatchManager) -> None:
    """Raises Refusal for axes that split an atom, or rows of a device that are not whole atoms."""
    if not config.optimizer.reproducible_sums:
        return
    for axis in AXES:
        if axis in _AXES or mesh.sizes[axis] == 1:
            continue
        sizes = {"ici": mesh.ici[axis], "dcn": mesh.dcn[axis]}
        names = [axis_key(net, axis) for net, size in sizes.items() if size > 1]
        rule = "must be 1 beside reproducible_sums=true, which splits no row or layer over devices"
        works: dict[str, Value] = dict.fromkeys(names, 1)
        if all(config[axis_key("ici", other)] != -1 for other in AXES if other != axis):
            works["ici_fsdp_parallelism"] = -1
        raise Refusal(config, names[0], rule, works)

    name = "reproducible_rows"
    stages = [stage for stage in manager.stages if stage.num_steps != 0]
    per_device = math.gcd(*(s.micro_batch_size_to_train_on for s in stages)) // mesh.num_devices
    if config.batch.max_tokens_per_pass is not None:  # an atom is of whole samples
        per_device //= config.recipe.rows_per_sample
    rows = config.optimizer[name]
    if per_device % rows:
        rule = f"must divide the {per_device} rows that a device has in a pass"
        raise Refusal(config, name, rule, {name: nearest_divisor(per_device, rows)})
    slots = max(s.global_batch_size + s.padded_slots_per_step for s in stages)
    if slots > MOST_ATOMS * rows:
        rule = f"must cut the {slots:,} rows of an update into at most {MOST_ATOMS:,} parts"
        least = -(-slots // MOST_ATOMS)
        fits = min((r for r in divisors(per_device) if r >= least), default=None)
        raise Refusal(config, name, rule, {name: fits} if fits else {"reproducible_sums": False})
