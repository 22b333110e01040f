"""The meshes of a run as numbers: how many devices each axis has, within a slice and over slices.
No JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import MeshConfig
from maxbatch.config.values import Value, exact
from maxbatch.families.cycle import cycle_length
from maxbatch.families.matrices import forms_of, num_layers, num_stacked
from maxbatch.plan.divisors import largest_divisor, nearest_divisor
from maxbatch.plan.refusal import Refusal, in_words, stated
from maxbatch.system.errors import ConfigError

AXES = ("data", "fsdp", "expert", "tensor", "context", "pipeline")
BATCH_AXES = ("data", "fsdp", "expert")
MODEL_AXES = ("tensor", "context", "pipeline")
MOST_DEVICES = 2**31
# The axis that takes over the devices of another axis.
_TAKES_REST = {"ici": "fsdp", "dcn": "data"}
# The key of the dimension of the model that an axis splits. The axis must divide it.
_SPLIT = {
    "expert": "num_experts",
    "tensor": "base_num_query_heads",
    "context": "max_target_length",
    "pipeline": "base_num_decoder_layers",
}
# The keys of the two axes of the mesh that samples, where they are stated.
_OF_SAMPLING = {"data": "rollout_data_parallelism", "tensor": "rollout_tensor_parallelism"}
_SHARES = ("trainer_devices_fraction", "sampler_devices_fraction")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Axis sizes of the device mesh, in the order of `AXES`, every -1 resolved."""

    ici: Mapping[str, int]  # devices per axis within a slice
    dcn: Mapping[str, int]  # the factor that each axis is longer over slices
    num_slices: int = 1  # that the devices span

    @classmethod
    def from_config(cls, config: PlanConfig, num_devices: int, num_slices: int = 1) -> MeshShape:
        """Resolves `ici_*_parallelism` and `dcn_*_parallelism` for N devices over all slices.

        With 1 slice the dcn sizes are further factors of the axes, so that a mesh over slices can
        be planned and simulated on a machine without slices.

        Raises:
          ConfigError: the sizes do not multiply to the devices, or two axes of a network are -1.
        """
        check_machine(num_devices, num_slices)
        slices = num_slices
        if num_slices == 1:
            sizes = {axis: max(1, config[axis_key("dcn", axis)]) for axis in AXES}
            slices = math.prod(sizes.values())
            if num_devices % slices:
                rule = (
                    f"the dcn axes multiply to {slices}, which must divide the {num_devices} "
                    "devices"
                )
                largest = max(AXES, key=lambda axis: sizes[axis])
                raise Refusal(
                    config, axis_key("dcn", largest), rule, _smaller("dcn", sizes, num_devices)
                )
        dcn = _resolve(config, "dcn", slices, "slices")
        name = "devices" if slices == 1 else "devices of a slice"
        return cls(_resolve(config, "ici", num_devices // slices, name), dcn, num_slices)

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis: ici x dcn."""
        return {axis: self.ici[axis] * self.dcn[axis] for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Parts that every micro-batch is split into: data x fsdp x expert."""
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @property
    def num_replicas(self) -> int:
        """Groups of devices that each hold the whole model between them: N / (tensor x context x
        pipeline).
        """
        return self.num_devices // math.prod(self.sizes[axis] for axis in MODEL_AXES)

    @property
    def num_pipeline_stages(self) -> int:
        """Groups of layers that run one after another on different devices."""
        return self.sizes["pipeline"]


class RunMeshes(NamedTuple):
    """The mesh shapes of a run; equal unless reinforcement learning samples on another mesh or
    other devices.
    """

    training: MeshShape
    sampling: MeshShape
    num_devices: int  # N, all devices of the run

    @classmethod
    def from_config(
        cls, config: PlanConfig, num_devices: int, num_slices: int = 1, num_hosts: int = 1
    ) -> RunMeshes:
        """Resolves the axis sizes on N devices in that many slices.

        If some devices train and others sample, several hosts each divide their own devices, and
        one host of several slices divides the slices.

        Raises:
          ConfigError: the devices cannot be shared out, or the axes do not multiply to them.
        """
        check_machine(num_devices, num_slices)
        check_divides("num_hosts=", num_hosts, num_devices)
        samples = config.recipe.is_sampled
        is_shared = all(exact(config[share]) == 1 for share in _SHARES)
        counts, slices = (num_devices, num_devices), (num_slices, num_slices)
        if samples and not is_shared:
            # Hosts and slices are alike: divide the devices of one, and count the others with it.
            divisions = math.lcm(num_hosts, num_slices) if num_hosts > 1 else 1
            per_slice = num_devices // max(divisions, num_slices)
            counts = _shared_out(config, num_devices // divisions, per_slice, of_host=divisions > 1)
            if divisions == 1:
                slices = -(-counts[0] // per_slice), -(-counts[1] // per_slice)
            counts = counts[0] * divisions, counts[1] * divisions
        training = MeshShape.from_config(config, counts[0], slices[0])
        if samples and _states_sampling(config):
            sampling = _sampling_shape(config, counts[1], slices[1])
        elif samples and not is_shared:
            sampling = MeshShape.from_config(config, counts[1], slices[1])
        else:
            sampling = training
        return cls(training, sampling, num_devices)


def check_machine(num_devices: int, num_slices: int) -> None:
    """Raises ConfigError if the machine lacks such devices, or has another number of slices."""
    if not 1 <= num_devices <= MOST_DEVICES:
        works = max(1, min(num_devices, MOST_DEVICES))
        rule = f"must be from 1 to {MOST_DEVICES}"
        raise ConfigError(f"num_devices={num_devices}: {rule}; works: num_devices={works}")
    check_divides("num_slices=", num_slices, num_devices)


def check_divides(prefix: str, number: int, num_devices: int) -> None:
    """Raises ConfigError if not every host (or slice) would have the same number of devices.

    Args:
      prefix: the text before the number in the message, such as `num_hosts=` or `--hosts `.
    """
    if number < 1 or num_devices % number:
        works = largest_divisor(num_devices, number) or 1
        raise ConfigError(
            f"{prefix}{number}: must divide the {num_devices} devices; works: {prefix}{works}"
        )


def pipeline_microbatches(mesh: MeshConfig, num_stages: int) -> int:
    """Returns the parts that a pipeline cuts a micro-batch into: as stated, else one per stage."""
    microbatches = mesh.num_pipeline_microbatches
    return num_stages if microbatches == -1 else microbatches


def check_model_fits(config: PlanConfig, shape: MeshShape) -> None:
    """Raises ConfigError if an axis does not divide the dimension of the model that it splits."""
    for axis, name in _SPLIT.items():
        works: dict[str, Value] = {}
        room = _room(config, axis)
        for net, size in (("dcn", shape.dcn[axis]), ("ici", shape.ici[axis])):
            fits = math.gcd(size, room)
            room //= fits  # the ici axis divides what the dcn axis leaves
            # The devices that the axis gives up need another axis; one of -1 takes them by itself.
            takes_rest = all(config[axis_key(net, other)] != -1 for other in AXES if other != axis)
            rest = {axis_key(net, _TAKES_REST[net]): -1} if takes_rest else {}
            works |= {axis_key(net, axis): fits, **rest} if fits != size else {}
        if works:
            rule = f"the {axis} axis of {shape.sizes[axis]} must divide {_dimension(config, name)}"
            raise Refusal(config, next(iter(works)), rule, works)
    key, stages, repeats = (
        "num_pipeline_repeats",
        shape.num_pipeline_stages,
        config.mesh.num_pipeline_repeats,
    )
    most = num_stacked(config.model) // stages if stages > 1 else 1
    if most % repeats:
        rule = "there is no pipeline to repeat with 1 stage"
        if stages > 1:
            layers = _dimension(config, "base_num_decoder_layers")
            rule = f"{stages} stages x {repeats} repeats must divide {layers}"
        raise Refusal(config, key, rule, {key: nearest_divisor(most, repeats)})


def check_sampler_fits(config: PlanConfig, shape: MeshShape) -> None:
    """Raises ConfigError if an axis of the mesh that samples does not divide the dimension of the
    model it splits.
    """
    if not config.recipe.is_sampled or not _states_sampling(config):
        check_model_fits(config, shape)
    elif config.model.base_num_query_heads % shape.sizes["tensor"]:
        heads = _dimension(config, _SPLIT["tensor"])
        name = _OF_SAMPLING["data" if config[_OF_SAMPLING["tensor"]] == -1 else "tensor"]
        rule = (
            f"the {shape.sizes['tensor']} devices that share a copy of the weights must divide "
            f"{heads}"
        )
        raise _sampling_refusal(
            config, name, rule, shape.sizes["tensor"], shape.num_devices, shape.num_slices
        )


def _states_sampling(config: PlanConfig) -> bool:
    return any(config[name] != -1 for name in _OF_SAMPLING.values())


def _sampling_shape(config: PlanConfig, num_devices: int, num_slices: int) -> MeshShape:
    """Returns the mesh that samples, of N devices in that many slices: copies of the weights x
    devices of a copy.
    """
    per_slice = num_devices // num_slices
    data, tensor = (config[name] for name in _OF_SAMPLING.values())
    of_copy = num_devices // data if tensor == -1 else tensor
    if of_copy < 1 or per_slice % of_copy or (data != -1 and data * of_copy != num_devices):
        # The one that cannot be right whatever the other is.
        name, other = _OF_SAMPLING["data"], _OF_SAMPLING["tensor"]
        if tensor != -1 and per_slice % tensor:
            name, other = other, name
        other_axis = other if config[other] == -1 else stated(config, other)
        within = "" if num_slices == 1 else f", a copy of the weights within a slice of {per_slice}"
        rule = f"x {other_axis} must be the {num_devices} devices that sample{within}"
        raise _sampling_refusal(config, name, rule, of_copy, num_devices, num_slices)
    ones = dict.fromkeys(AXES, 1)
    ici = ones | {"data": per_slice // of_copy, "tensor": of_copy}
    return MeshShape(ici, ones | {"data": num_slices}, num_slices)


def _sampling_refusal(
    config: PlanConfig, name: str, rule: str, of_copy: int, num_devices: int, num_slices: int
) -> Refusal:
    """Returns the refusal of a mesh that samples; it changes the keys that are stated to the
    nearest sizes.
    """
    most = math.gcd(config.model.base_num_query_heads, num_devices // num_slices)
    tensor = nearest_divisor(most, of_copy) or 1
    wanted = {_OF_SAMPLING["data"]: num_devices // tensor, _OF_SAMPLING["tensor"]: tensor}
    works = {other: size for other, size in wanted.items() if config[other] not in (-1, size)}
    return Refusal(config, name, rule, works)


def _room(config: PlanConfig, axis: str) -> int:
    """Returns the size of the model's dimension that an axis splits; of the pipeline: layers or
    cycles of layers.
    """
    if axis == "pipeline" and _no_pipeline(config):
        return 1
    return num_stacked(config.model) if axis == "pipeline" else int(config[_SPLIT[axis]])


def _no_pipeline(config: PlanConfig) -> str:
    """Returns why a form of the model's layers allows no pipeline; empty if all do."""
    return next((form.no_pipeline for form in forms_of(config.model) if form.no_pipeline), "")


def _dimension(config: PlanConfig, name: str) -> str:
    """Returns the statement of such a dimension."""
    dense, cycle = config.model.first_num_dense_layers, cycle_length(config.model)
    if name == _SPLIT["pipeline"] and (why := _no_pipeline(config)):
        return f"1 beside {stated(config, 'decoder_block')}, {why}"
    if name == _SPLIT["pipeline"] and cycle > 1:
        return f"the {num_stacked(config.model)} cycles of {cycle} layers in {stated(config, name)}"
    if name != _SPLIT["pipeline"] or not dense:
        return stated(config, name)
    return f"{stated(config, name)} - first_num_dense_layers={dense} = {num_layers(config.model)}"


def axis_key(net: str, axis: str) -> str:
    """Returns the config key of an axis within a slice ("ici") or over slices ("dcn")."""
    return f"{net}_{axis}_parallelism"


def _resolve(config: PlanConfig, net: str, total: int, name: str) -> dict[str, int]:
    """Returns the size of each axis of a network ("ici" or "dcn") that has `total` devices or
    slices.
    """
    sizes: dict[str, int] = {axis: config[axis_key(net, axis)] for axis in AXES}
    rest = [axis for axis in AXES if sizes[axis] == -1]
    if len(rest) > 1:
        works = {axis_key(net, other): 1 for other in rest[1:]}
        raise Refusal(config, axis_key(net, rest[0]), f"only one {net} axis may be -1", works)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if total % fixed or (not rest and total != fixed):
        raise _misfit(
            config, sizes, net, f"the {net} axes must multiply to the {total} {name}", total
        )
    return sizes | dict.fromkeys(rest, total // fixed)


def _misfit(
    config: PlanConfig, sizes: Mapping[str, int], net: str, rule: str, total: int
) -> Refusal:
    """Returns the refusal of sizes that do not multiply to total; it changes only one axis if that
    is enough.
    """
    rest = next((axis for axis in AXES if sizes[axis] == -1), None)
    *by_size, _ = sorted(AXES, key=lambda axis: sizes[axis], reverse=True)
    # One axis is enough where the sizes of the others divide the devices.
    for axis in by_size if rest else (_TAKES_REST[net], *BATCH_AXES):
        limit, remainder = divmod(total, math.prod(sizes[a] for a in AXES if a not in (axis, rest)))
        if remainder == 0:
            of_model = _room(config, axis) if axis in _SPLIT else limit
            size = nearest_divisor(math.gcd(limit, of_model), sizes[axis]) if rest else -1
            return Refusal(config, axis_key(net, axis), rule, {axis_key(net, axis): size})

    takes_rest = rest or _TAKES_REST[net]
    works = _smaller(net, {axis: sizes[axis] for axis in AXES if axis != takes_rest}, total)
    works |= {} if rest else {axis_key(net, takes_rest): -1}
    return Refusal(config, axis_key(net, by_size[0]), rule, works)


def _smaller(net: str, sizes: Mapping[str, int], total: int) -> dict[str, Value]:
    """Returns the sizes that change if each becomes a divisor of the total that earlier sizes
    leave.
    """
    works: dict[str, Value] = {}
    for axis, size in sizes.items():
        fits = math.gcd(size, total)
        total //= fits
        if fits != size:
            works[axis_key(net, axis)] = fits
    return works


def _shared_out(
    config: PlanConfig, num_devices: int, per_slice: int, of_host: bool
) -> tuple[int, int]:
    """Returns how many devices train and how many others sample; with several slices, each part has
    whole slices.

    Args:
      of_host: whether the devices are a host's; otherwise a slice's, where one host has several
        slices.
    """
    of_each_host = " of each host" if of_host else ""
    if num_devices == 1:
        rule = (
            f"must be 1, and {_SHARES[1]} too, since the one device{of_each_host} trains and "
            "samples"
        )
        raise Refusal(config, _SHARES[0], rule, dict.fromkeys(_SHARES, 1))
    counts = {name: exact(config[name]) * num_devices for name in _SHARES}
    for name, count in counts.items():
        in_slices = count <= per_slice or count % per_slice == 0
        if count.denominator != 1 or not 0 < count < num_devices or not in_slices:
            others = math.floor(sum(counts.values()) - count)
            most = num_devices - max(others, 1) if others < num_devices else num_devices - 1
            nearest = min(max(round(count), 1), most)
            if nearest > per_slice:
                nearest = min(round(nearest / per_slice) * per_slice, num_devices - per_slice)
            slices = f", or of slices of {per_slice}," if per_slice != num_devices else ""
            rule = (
                f"x {num_devices} devices{of_each_host} = {in_words(count)} must be a whole "
                f"number{slices} that leaves devices to the others"
            )
            raise Refusal(config, name, rule, {name: Fraction(nearest, num_devices)})
    trainers, samplers = (int(count) for count in counts.values())
    if trainers + samplers > num_devices:
        rule = f"with {stated(config, _SHARES[0])} must be at most 1 together, or both be 1"
        raise Refusal(
            config, _SHARES[1], rule, {_SHARES[1]: Fraction(num_devices - trainers, num_devices)}
        )
    return trainers, samplers
