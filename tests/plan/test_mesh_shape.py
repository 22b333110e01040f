"""The mesh as numbers: axis sizes multiply to the devices, and an error names sizes that do."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import ConfigError, load_config
from maxbatch.plan.mesh_shape import AXES, MeshShape

KEYS = [f"{net}_{axis}_parallelism" for net in ("ici", "dcn") for axis in AXES]


def shape(num_devices: int, num_slices: int = 1, **sizes: int) -> MeshShape:
    return MeshShape.from_config(
        load_config(overrides=[f"{k}={v}" for k, v in sizes.items()]), num_devices, num_slices
    )


def test_by_default_all_devices_split_parameters_and_batch() -> None:
    mesh = shape(10240)
    assert mesh.sizes == {"data": 1, "fsdp": 10240, "tensor": 1, "context": 1, "pipeline": 1}
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
    assert mesh.ici == {"data": 2, "fsdp": 2, "tensor": 4, "context": 1, "pipeline": 2}
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
