"""The devices that train and those that sample: shared out whole, each with a mesh of its own."""

from __future__ import annotations

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.plan.run_meshes import RunMeshes


def meshes(num_devices: int, num_slices: int = 1, *overrides: str) -> RunMeshes:
    return RunMeshes.from_config(load_config(overrides=["batch_size=8", *overrides]), num_devices, num_slices)


def apart(trainers: str, samplers: str) -> tuple[str, str]:
    return f"trainer_devices_fraction={trainers}", f"sampler_devices_fraction={samplers}"


def test_without_fractions_all_devices_do_both_on_one_mesh() -> None:
    both = meshes(8, 2, "dcn_data_parallelism=-1")
    assert both.training is both.sampling
    assert (both.training.num_devices, both.training.num_slices) == (8, 2)


def test_fractions_give_each_side_its_devices_and_their_slices() -> None:
    one = meshes(8, 1, *apart("0.75", "0.25"))
    assert (one.training.num_devices, one.sampling.num_devices) == (6, 2)
    # Of 4 slices of 2 devices, 3 train and 1 samples.
    four = meshes(8, 4, *apart("0.75", "0.25"), "dcn_data_parallelism=-1")
    assert (four.training.num_slices, four.training.dcn["data"], four.training.ici["fsdp"]) == (3, 3, 2)
    assert (four.sampling.num_slices, four.sampling.num_devices) == (1, 2)


@pytest.mark.parametrize(
    ("num_devices", "num_slices", "fractions", "said"),
    [
        (1, 1, ("0.5", "0.5"), "works: trainer_devices_fraction=1 sampler_devices_fraction=1"),
        (4, 1, ("1/3", "0.5"), "= 4/3 must be a whole number that leaves devices to the others; works: "
                               "trainer_devices_fraction=0.25"),
        (4, 1, ("1", "0.5"), "trainer_devices_fraction=1: x 4 devices = 4 must be .*; works: "
                             "trainer_devices_fraction=0.5"),
        (8, 2, ("0.75", "0.25"), "= 6 must be a whole number, or of slices of 4, that leaves .*; works: "
                                 "trainer_devices_fraction=0.5"),
        (4, 1, ("0.75", "0.5"), "with trainer_devices_fraction=0.75 must be at most 1 together.*=0.25$"),
    ],
)  # fmt: skip
def test_devices_that_cannot_be_shared_out_are_refused(
    num_devices: int, num_slices: int, fractions: tuple[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        meshes(num_devices, num_slices, *apart(*fractions))
