"""The folders of `compile --survive`: a run takes the programs of the machine that it starts on."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxbatch.data.feed.placement import BatchShape
from maxbatch.run.compile.saved import SavedPrograms, save_programs
from maxbatch.run.compile.target import machine_name
from maxbatch.system.errors import ConfigError


def mesh(num_devices: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:num_devices]), ("data",))


def shapes_for(folder: Path, num_devices: int) -> list[BatchShape]:
    return SavedPrograms(str(folder), {}, mesh(num_devices)).shapes


def test_a_run_takes_the_programs_of_the_machine_that_it_starts_on(tmp_path: Path) -> None:
    devices, folder = jax.devices(), tmp_path / "compiled"
    save_programs(folder, {}, devices[:4], [BatchShape(4, 1)], {})
    save_programs(folder / machine_name(devices[:2]), {}, devices[:2], [BatchShape(2, 2)], {})
    assert shapes_for(folder, 4) == [BatchShape(4, 1)]
    assert shapes_for(folder, 2) == [BatchShape(2, 2)]
    with pytest.raises(ConfigError, match="devices: 4 there, 1 here"):
        shapes_for(folder, 1)


def test_programs_compiled_later_for_a_smaller_machine_alone_go_before(tmp_path: Path) -> None:
    devices, folder = jax.devices(), tmp_path / "compiled"
    save_programs(folder / machine_name(devices[:2]), {}, devices[:2], [BatchShape(2, 2)], {})
    save_programs(folder, {}, devices[:2], [BatchShape(2, 1)], {})
    assert shapes_for(folder, 2) == [BatchShape(2, 1)]
