"""Slices as they are sold: axes, wrap-around links, hosts and the form of a chip."""

from __future__ import annotations

import pytest

from maxbatch import ConfigError
from maxbatch.training.compile.topology import parse_slice


@pytest.mark.parametrize(
    "topology",
    ["v5p:2x2x3x9", "v9:2x2", "v5e:3x4", "v5p:1x1x1", "v6e", "", "v5e:4x4x4", "tpu7x:0x0x0", "v5p:9999x9999x9999"],
)  # fmt: skip
def test_an_unknown_topology_names_one_that_works(topology: str) -> None:
    with pytest.raises(ConfigError, match="works: --topology ") as refused:
        parse_slice(topology)
    named = str(refused.value).rpartition("--topology ")[2]
    assert str(parse_slice(named)) == named


@pytest.mark.parametrize(
    ("topology", "wrap", "chip_config"),
    [
        ("v4:4x4x4", (True, True, True), "megacore_dense"),
        ("v4:2x2x4", (False, False, False), "megacore_dense"),
        ("v5p:4x4x8", (True, True, True), "megacore"),
        ("v5p:2x4x4", (False, False, False), "megacore"),
        ("tpu7x:4x8x8", (True, True, True), "default"),
        ("tpu7x:2x2x1", (False, False, False), "default"),
        ("v5e:16x16", (True, True, False), "default"),
        ("v5e:8x16", (False, True, False), "default"),
        ("v6e:16x16", (True, True, False), "default"),
        ("v6e:8x8", (False, False, False), "default"),
    ],
)
def test_cubes_wrap_on_every_axis_and_flat_slices_where_an_axis_is_the_pod_s(
    topology: str, wrap: tuple[bool, bool, bool], chip_config: str
) -> None:
    options = parse_slice(topology).options
    assert options == {"chip_config_name": chip_config, "wrap": wrap, "chips_per_host_bounds": (2, 2, 1)}


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_a_slice_of_one_chip_is_a_host_of_one_chip(topology: str) -> None:
    sold = parse_slice(topology)
    assert sold.num_chips == 1
    assert sold.options["chips_per_host_bounds"] == (1, 1, 1)


@pytest.mark.parametrize(("alias", "name"), [("v5litepod:2x4", "v5e:2x4"), ("Ironwood:2x2x1", "tpu7x:2x2x1")])
def test_names_in_use_elsewhere_are_taken(alias: str, name: str) -> None:
    assert str(parse_slice(alias)) == name
