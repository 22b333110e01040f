"""Figures of samples under given parameters, each computed alone by one program for one device.

So they are equal to the last bit wherever a sample lies.

Shapes: M samples of a batch, N devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxbatch.data.feed.placement import BatchShape
from maxbatch.parallel.trees import State
from maxbatch.update.reproducible.programs import DevicePrograms, form, mesh_of, on
from maxbatch.update.reproducible.rows import AtomRows, RowPlacement


class Reading(Protocol):
    """A forward pass over samples with given parameters."""

    @property
    def name(self) -> str:
        """Name of the compiled program."""

    @property
    def placement(self) -> RowPlacement:
        """The placement of its batches."""

    @property
    def shape(self) -> BatchShape:
        """The shape of its batches, of one micro-batch."""

    def figures_on(self, mesh: Mesh) -> Callable[[State, Any], Any]:
        """Returns the function (parameters, arranged samples) -> figures, for programs on a
        mesh.
        """


class SamplesAlone:
    """A pass over batches of samples, compiled.

    Args:
      abstract: shapes and shardings of the parameters.
    """

    def __init__(self, programs: DevicePrograms, reading: Reading, abstract: State) -> None:
        self._programs = programs
        self._rows = AtomRows(programs, reading.placement, reading.shape, 1)
        figures_of = reading.figures_on(mesh_of(programs.devices[0]))
        forms = jax.tree.map(lambda x: form(x.shape, x.dtype), abstract)
        of_sample = jax.eval_shape(figures_of, forms, self._rows.form)
        per_device = reading.shape.micro_batch // programs.mesh.size
        of_device = jax.tree.map(
            lambda x: form((1, per_device, *x.shape[1:]), x.dtype, programs.split), of_sample
        )

        def add(params: State, figures: Any, number: jax.Array, sample: Any) -> Any:
            return jax.tree.map(
                lambda all_of_them, x: all_of_them.at[0, number].set(x[0]),
                figures,
                figures_of(params, sample),
            )

        self._nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), of_device)
        number = form((), jnp.int32)
        self._add = programs.on_devices(
            reading.name, add, (forms, of_device, number, self._rows.form)
        )
        of_all = jax.tree.map(
            lambda x: form((programs.mesh.size, *x.shape[1:]), x.dtype, programs.split), of_device
        )

        def joined(figures: Any) -> Any:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), figures)

        self._join = programs.on_mesh(f"{reading.name}-samples", joined, of_all, out=programs.whole)
        leaves = jax.tree.leaves(abstract)
        self._gather = programs.on_mesh(
            f"{reading.name}-gather", lambda arrays: arrays, leaves, out=programs.whole
        )

    def under(self, params: State) -> Callable[[Any], Any]:
        """Returns the function that computes the figures of a batch, [M, ...], whole on every
        device.

        Args:
          params: the parameters, in their shards.
        """
        programs = self._programs
        leaves, structure = jax.tree.flatten(params)
        whole = programs.run(self._gather, leaves)
        return partial(
            self._figures,
            {d: jax.tree.unflatten(structure, on(d, whole)) for d in programs.devices},
        )

    def _figures(self, params: dict[jax.Device, State], batch: Any) -> Any:
        programs = self._programs
        figures = {d: jax.device_put(self._nothing, d) for d in programs.devices}
        for number, samples in enumerate(self._rows.of(batch, 1)):
            for device, sample in samples.items():
                figures[device] = self._add[device](
                    params[device], figures[device], np.int32(number), sample
                )
        parts = programs.of_devices([figures[device] for device in programs.devices])
        return programs.run(self._join, parts)
