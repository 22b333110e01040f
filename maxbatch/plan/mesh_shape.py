"""The mesh as numbers: how many devices each axis has, within a slice and over slices. No JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ml_collections import ConfigDict

from maxbatch.system.errors import ConfigError

AXES = ("data", "fsdp", "tensor", "context", "pipeline")
BATCH_AXES = ("data", "fsdp")
# What an axis splits of the model, and so must divide.
_SPLIT = {
    "tensor": "base_num_query_heads",
    "context": "max_target_length",
    "pipeline": "base_num_decoder_layers",
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Axis sizes of the device mesh, in the order of `AXES`, every -1 resolved.

    Attributes:
      ici: devices per axis within a slice.
      dcn: the factor that each axis is longer over slices.
    """

    ici: Mapping[str, int]
    dcn: Mapping[str, int]

    @classmethod
    def from_config(cls, config: ConfigDict, num_devices: int, num_slices: int = 1) -> MeshShape:
        """Resolve `ici_*_parallelism` and `dcn_*_parallelism`.

        Args:
          config: the run's config.
          num_devices: N, over all slices.
          num_slices: slices that the devices span. With 1 the dcn sizes are further factors of the axes, so
            that a mesh over slices can be planned and simulated where there are none.

        Raises:
          ConfigError: the sizes do not multiply out to the devices, or two axes of a network are -1.
        """
        dcn_fixed = math.prod(max(1, config[_key("dcn", axis)]) for axis in AXES)
        slices = num_slices if num_slices > 1 else dcn_fixed
        if num_devices % slices and num_slices > 1:
            nearest = max(s for s in range(1, num_slices + 1) if num_devices % s == 0)
            raise ConfigError(
                f"num_slices={num_slices}: must divide the {num_devices} devices; works: num_slices={nearest}"
            )
        if num_devices % slices:
            key = max((_key("dcn", axis) for axis in AXES), key=lambda name: config[name])
            works = " ".join(f"{_key('dcn', axis)}=1" for axis in AXES if config[_key("dcn", axis)] > 1)
            raise ConfigError(
                f"{key}={config[key]}: the dcn axes multiply to {slices}, which must divide the "
                f"{num_devices} devices; works: {works}"
            )
        dcn = _resolve(config, "dcn", slices, "slices")
        what = "devices" if slices == 1 else "devices of a slice"
        return cls(_resolve(config, "ici", num_devices // slices, what), dcn)

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis: ici x dcn."""
        return {axis: self.ici[axis] * self.dcn[axis] for axis in AXES}

    @property
    def batch_shards(self) -> int:
        """Parts that every micro-batch is split into: data x fsdp."""
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @property
    def num_pipeline_stages(self) -> int:
        """Groups of layers that run one after another on different devices."""
        return self.sizes["pipeline"]


def pipeline_microbatches(config: ConfigDict, num_stages: int) -> int:
    """Return the parts that a pipeline cuts a micro-batch into: as stated, else one per stage."""
    stated = config.num_pipeline_microbatches
    return num_stages if stated == -1 else stated


def check_model_fits(config: ConfigDict, shape: MeshShape) -> None:
    """Check that the axes tensor, context and pipeline divide what they split of the model.

    Raises:
      ConfigError: one does not; the message names the nearest size that does.
    """
    for axis in ("tensor", "context"):
        _check_divides(config, shape, axis)
    check_layers_fit(config, shape)


def check_layers_fit(config: ConfigDict, shape: MeshShape) -> None:
    """Check that stages, and what each repeats, divide the layers.

    Raises:
      ConfigError: they do not; the message names the nearest number that does.
    """
    _check_divides(config, shape, "pipeline")
    layers, stages = config.base_num_decoder_layers, shape.num_pipeline_stages
    repeats, most = config.num_pipeline_repeats, layers // stages if stages > 1 else 1
    if most % repeats:
        nearest = min((r for r in range(1, most + 1) if most % r == 0), key=lambda r: abs(r - repeats))
        rule = "there is no pipeline to repeat with 1 stage"
        if stages > 1:
            rule = f"{stages} stages x {repeats} repeats must divide base_num_decoder_layers={layers}"
        raise ConfigError(f"num_pipeline_repeats={repeats}: {rule}; works: num_pipeline_repeats={nearest}")


def _check_divides(config: ConfigDict, shape: MeshShape, axis: str) -> None:
    """Check that an axis divides what it splits, or raise with the largest part of it that does."""
    name = _SPLIT[axis]
    room = config[name]
    if room % shape.sizes[axis] == 0:
        return
    stated, works = "", []
    for net, sizes, takes_rest in (("dcn", shape.dcn, "data"), ("ici", shape.ici, "fsdp")):
        fits = max(d for d in range(1, sizes[axis] + 1) if sizes[axis] % d == 0 and room % d == 0)
        room //= fits
        if fits != sizes[axis]:
            key = _key(net, axis)
            stated = stated or f"{key}={config[key]}"
            works.append(f"{key}={fits}")
            if all(config[_key(net, other)] != -1 for other in AXES if other != axis):
                works.append(f"{_key(net, takes_rest)}=-1")
    raise ConfigError(
        f"{stated}: the {axis} axis of {shape.sizes[axis]} must divide {name}={config[name]}; "
        f"works: {' '.join(works)}"
    )


def _key(net: str, axis: str) -> str:
    return f"{net}_{axis}_parallelism"


def _resolve(config: ConfigDict, net: str, total: int, what: str) -> dict[str, int]:
    sizes = {axis: config[_key(net, axis)] for axis in AXES}
    rest = [axis for axis in AXES if sizes[axis] == -1]
    if len(rest) > 1:
        first, *others = rest
        works = " ".join(f"{_key(net, axis)}=1" for axis in others)
        raise ConfigError(f"{_key(net, first)}=-1: only one {net} axis may be -1; works: {works}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if rest and total % fixed == 0:
        sizes[rest[0]] = total // fixed
    elif rest or fixed != total:
        raise _misfit(config, sizes, net, total, what)
    return sizes


def _misfit(config: ConfigDict, sizes: Mapping[str, int], net: str, total: int, what: str) -> ConfigError:
    """Return the error for sizes that do not multiply to total, with the least change that does and splits the model
    evenly."""

    def splits(axis: str, size: int) -> bool:
        return axis not in _SPLIT or config[_SPLIT[axis]] % size == 0

    rule = f"the {net} axes must multiply to the {total} {what}"
    rest = next((axis for axis in AXES if sizes[axis] == -1), None)
    by_size = sorted(AXES, key=lambda axis: sizes[axis], reverse=True)
    for axis in by_size if sizes[by_size[0]] > 1 else (rest or "fsdp",):
        others = math.prod(sizes[a] for a in AXES if a not in (axis, rest))
        if total % others == 0:
            limit = total // others
            candidates = range(1, min(limit, 2 * abs(sizes[axis])) + 1) if rest else (limit,)
            fitting = [d for d in candidates if limit % d == 0 and splits(axis, d)]
            if not fitting:
                continue
            nearest = min(fitting, key=lambda d: abs(d - sizes[axis]))
            return ConfigError(f"{_key(net, axis)}={sizes[axis]}: {rule}; works: {_key(net, axis)}={nearest}")
    works = " ".join(f"{_key(net, a)}=1" for a in AXES if sizes[a] > 1 and a != "fsdp")
    works = f"{works} {_key(net, 'fsdp')}={-1 if rest in (None, 'fsdp') else 1}".strip()
    return ConfigError(f"{_key(net, by_size[0])}={sizes[by_size[0]]}: {rule}; works: {works}")
