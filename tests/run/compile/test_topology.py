"""Slices as they are sold: axes, wrap-around links, hosts and the form of a chip."""

from __future__ import annotations

import json

import pytest

from maxbatch import ConfigError
from maxbatch.cli import main
from maxbatch.run.compile.topology import parse_slice


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
    assert options == {
        "chip_config_name": chip_config,
        "wrap": wrap,
        "chips_per_host_bounds": (2, 2, 1),
    }


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_a_slice_of_one_chip_is_a_host_of_one_chip(topology: str) -> None:
    sold = parse_slice(topology)
    assert sold.num_chips == 1
    assert sold.options["chips_per_host_bounds"] == (1, 1, 1)


@pytest.mark.parametrize(
    ("alias", "name"), [("v5litepod:2x4", "v5e:2x4"), ("Ironwood:2x2x1", "tpu7x:2x2x1")]
)
def test_names_in_use_elsewhere_are_taken(alias: str, name: str) -> None:
    assert str(parse_slice(alias)) == name


# Google's names and the shapes that MaxText's table of slices gives them.
DEFAULT_SHAPES = {
    "v4-8": "v4:2x2x1",
    "v4-64": "v4:2x4x4",
    "v4-384": "v4:4x4x12",
    "v4-4096": "v4:8x16x16",
    "v5p-8": "v5p:2x2x1",
    "v5p-16": "v5p:2x2x2",
    "v5p-32": "v5p:2x2x4",
    "v5p-128": "v5p:4x4x4",
    "v5p-1152": "v5p:4x12x12",
    "v5p-1408": "v5p:4x4x44",
    "v5p-3456": "v5p:12x12x12",
    "v5p-4480": "v5p:4x20x28",
    "v5p-9216": "v5p:12x16x24",
    "v5p-12288": "v5p:16x16x24",
    "v5p-17920": "v5p:16x20x28",
    "v5litepod-8": "v5e:2x4",
    "v5litepod-256": "v5e:16x16",
    "v5e-16": "v5e:4x4",
    "v6e-1": "v6e:1x1",
    "v6e-128": "v6e:8x16",
    "v6e-256": "v6e:16x16",
    "tpu7x-2": "tpu7x:1x1x1",
    "tpu7x-128": "tpu7x:4x4x4",
    "tpu7x-18432": "tpu7x:16x24x24",
    "TPU7x-64": "tpu7x:2x4x4",
}


@pytest.mark.parametrize(("name", "shape"), DEFAULT_SHAPES.items())
def test_a_name_of_googles_is_its_slice_in_the_default_shape(name: str, shape: str) -> None:
    sold = parse_slice(name)
    assert str(sold) == shape
    cores = 2 if sold.version in ("v4", "v5p", "tpu7x") else 1
    assert sold.num_chips * cores == int(name.rpartition("-")[2])


def test_a_plan_for_a_slice_has_its_devices_and_hosts_and_says_its_shape(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, devices, hosts in (
        ("v5p-128", 64, 16),
        ("v6e-256", 256, 64),
        ("tpu7x-128", 128, 16),
        ("v6e:1x1", 1, 1),
    ):
        assert main(["plan", "--topology", name, "--json"]) == 0
        captured = capsys.readouterr()
        plan = json.loads(captured.out)
        assert (plan["num_devices"], plan["num_hosts"]) == (devices, hosts)
    assert main(["plan", "--topology", "v5p-128"]) == 0
    assert "--topology v5p-128 is v5p:4x4x4, 64 chips (128 TensorCores)" in capsys.readouterr().err


def test_no_name_of_a_slice_is_answered_with_one() -> None:
    with pytest.raises(ConfigError, match=r"works: --topology v5p:2x2x1$"):
        parse_slice("")
