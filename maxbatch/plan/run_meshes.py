"""The mesh shapes of a run, built once: that of the devices that train, and that of those that sample."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from ml_collections import ConfigDict

from maxbatch.config.values import exact
from maxbatch.plan.mesh_shape import MeshShape, check_machine, check_model_fits
from maxbatch.plan.refusal import Refusal, in_words, stated

_SHARES = ("trainer_devices_fraction", "sampler_devices_fraction")


@dataclasses.dataclass(frozen=True)
class RunMeshes:
    """The mesh shapes of a run.

    Attributes:
      training: shape of the devices that train.
      sampling: shape of the devices that sample in reinforcement learning; elsewhere that of training.
      num_devices: N, all devices of the run.
    """

    training: MeshShape
    sampling: MeshShape
    num_devices: int

    @classmethod
    def from_config(cls, config: ConfigDict, num_devices: int, num_slices: int = 1) -> RunMeshes:
        """Resolves the axis sizes on N devices in that many slices.

        Raises:
          ConfigError: the devices cannot be shared out, or the axes do not multiply to them.
        """
        check_machine(num_devices, num_slices)
        if config.batch_size is None or all(exact(config[share]) == 1 for share in _SHARES):
            shape = MeshShape.from_config(config, num_devices, num_slices)
            return cls(shape, shape, num_devices)
        per_slice = num_devices // num_slices
        counts = _shared_out(config, num_devices, per_slice)
        training, sampling = (MeshShape.from_config(config, n, -(-n // per_slice)) for n in counts)
        return cls(training, sampling, num_devices)

    def check_model_fits(self, config: ConfigDict) -> None:
        """Raises ConfigError where an axis of either mesh does not divide what it splits of the model."""
        check_model_fits(config, self.training)
        check_model_fits(config, self.sampling)


def _shared_out(config: ConfigDict, num_devices: int, per_slice: int) -> tuple[int, int]:
    """Returns how many devices train and how many others sample; those of several slices take whole ones."""
    if num_devices == 1:
        rule = f"must be 1, and {_SHARES[1]} too, since one device trains and samples"
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
                f"x {num_devices} devices = {in_words(count)} must be a whole number{slices} that leaves devices to "
                "the others"
            )
            raise Refusal(config, name, rule, {name: Fraction(nearest, num_devices)})
    trainers, samplers = (int(count) for count in counts.values())
    if trainers + samplers > num_devices:
        rule = f"with {stated(config, _SHARES[0])} must be at most 1 together, or both be 1"
        raise Refusal(config, _SHARES[1], rule, {_SHARES[1]: Fraction(num_devices - trainers, num_devices)})
    return trainers, samplers
