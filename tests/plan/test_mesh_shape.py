"""The meshes as numbers: axis sizes multiply to the devices, an error names sizes that do, RL
shares devices out.
"""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import ConfigError, load_config
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.mesh_shape import AXES, MeshShape, RunMeshes

KEYS = [f"{net}_{axis}_parallelism" for net in ("ici", "dcn") for axis in AXES]


def shape(num_devices: int, num_slices: int = 1, **sizes: int) -> MeshShape:
    return MeshShape.from_config(
        load_config(overrides=[f"{k}={v}" for k, v in sizes.items()]).plan, num_devices, num_slices
    )


def test_by_default_all_devices_split_parameters_and_batch() -> None:
    mesh = shape(10240)
    assert mesh.sizes == {
        "data": 1,
        "fsdp": 10240,
        "expert": 1,
        "tensor": 1,
        "context": 1,
        "pipeline": 1,
    }
    assert tuple(mesh.sizes) == AXES
    assert (mesh.batch_shards, mesh.num_pipeline_stages) == (10240, 1)


def test_minus_one_is_the_rest_and_slices_multiply_the_axes() -> None:
    mesh = shape(
        64,
        2,
        dcn_data_parallelism=-1,
        ici_tensor_parallelism=4,
        ici_pipeline_parallelism=2,
        ici_data_parallelism=2,
    )
    assert mesh.ici == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 4, "context": 1, "pipeline": 2}
    assert mesh.dcn["data"] == 2 and mesh.sizes["data"] == 4
    assert (mesh.batch_shards, mesh.num_pipeline_stages) == (8, 2)


def test_slices_can_be_planned_where_there_are_none() -> None:
    assert shape(8, dcn_data_parallelism=2).sizes["data"] == 2
    assert shape(8, dcn_pipeline_parallelism=2, ici_pipeline_parallelism=2).num_pipeline_stages == 4


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 10240]),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from([-1, 1, 2, 3, 4, 5, 8]), max_size=4),
)
def test_sizes_multiply_to_the_devices_or_the_error_leads_to_sizes_that_do(
    num_devices: int, sizes: dict[str, int]
) -> None:
    # Every error repairs one network or one double -1, so a few in a row must end in a mesh.
    for _ in range(5):
        try:
            assert math.prod(shape(num_devices, **sizes).sizes.values()) == num_devices
            return
        except ConfigError as error:
            stated, _, works = str(error).partition("; works: ")
            assert re.match(r"(ici|dcn)_\w+_parallelism=-?\d+: ", stated)
            sizes = sizes | {k: int(v) for k, v in (word.split("=") for word in works.split())}
    pytest.fail(f"{sizes} still do not fit {num_devices} devices")


def meshes(num_devices: int, num_slices: int = 1, *overrides: str, num_hosts: int = 1) -> RunMeshes:
    return RunMeshes.from_config(
        load_config(overrides=["batch_size=8", *overrides]).plan, num_devices, num_slices, num_hosts
    )


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
    assert (four.training.num_slices, four.training.dcn["data"], four.training.ici["fsdp"]) == (
        3,
        3,
        2,
    )
    assert (four.sampling.num_slices, four.sampling.num_devices) == (1, 2)


def test_of_several_hosts_each_shares_out_its_own_devices_so_that_both_sides_span_the_slices() -> (
    None
):
    two = meshes(16, 2, *apart("0.75", "0.25"), "dcn_data_parallelism=-1", num_hosts=4)
    assert (two.training.num_slices, two.training.dcn["data"], two.training.ici["fsdp"]) == (
        2,
        2,
        6,
    )
    assert (two.sampling.num_slices, two.sampling.dcn["data"], two.sampling.ici["fsdp"]) == (
        2,
        2,
        2,
    )
    with pytest.raises(
        ConfigError, match=r"x 2 devices of each host = 1.5 must .* trainer_devices_fraction=0.5$"
    ):
        meshes(8, 1, *apart("0.75", "0.25"), num_hosts=4)
    with pytest.raises(ConfigError, match="since the one device of each host trains and samples"):
        meshes(4, 1, *apart("0.5", "0.5"), num_hosts=4)
    with pytest.raises(ConfigError, match="num_hosts=3: must divide the 4 devices"):
        meshes(4, 1, *apart("0.5", "0.5"), num_hosts=3)


@pytest.mark.parametrize(
    ("num_devices", "num_slices", "stated", "sizes"),
    [
        (4, 1, ("rollout_tensor_parallelism=2",), (2, 2)),
        (
            4,
            1,
            ("rollout_data_parallelism=1", "ici_pipeline_parallelism=2", "num_pipeline_repeats=2"),
            (1, 4),
        ),
        (8, 2, ("rollout_tensor_parallelism=2", "dcn_data_parallelism=-1"), (4, 2)),
        (
            8,
            2,
            (*apart("0.5", "0.5"), "rollout_data_parallelism=2", "rollout_tensor_parallelism=2"),
            (2, 2),
        ),
    ],
)
def test_the_devices_that_sample_are_copies_of_the_weights_times_the_devices_of_a_copy(
    num_devices: int, num_slices: int, stated: tuple[str, ...], sizes: tuple[int, int]
) -> None:
    found = meshes(num_devices, num_slices, *stated)
    assert (found.sampling.sizes["data"], found.sampling.sizes["tensor"]) == sizes
    assert found.sampling.num_devices == math.prod(sizes)
    assert (
        found.training
        == meshes(num_devices, num_slices, *(s for s in stated if "rollout" not in s)).training
    )
    BatchPlan.from_config(
        load_config(overrides=["batch_size=8", *stated]), num_devices, num_slices=num_slices
    )
