"""The rows of batches, taken from them an atom at a time on each device.

These programs move rows alone, so they need not be the same in every layout.

Shapes: A micro-batches in the array, M rows in a micro-batch, L tokens in a row, N devices, r rows
of an atom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxbatch.data.feed.placement import Batch, BatchShape
from maxbatch.update.batch_sums import num_passes
from maxbatch.update.reproducible.programs import DevicePrograms, form, on


class RowPlacement(Protocol):
    """The placement of batches on a mesh, as of `maxbatch.data.feed.placement`."""

    @property
    def final(self) -> NamedSharding:
        """Sharding of arrays [A, M, L]."""

    def abstract_batch(self, shape: BatchShape) -> Any:
        """Returns the shapes and shardings of a staged batch, a NamedTuple."""

    def arrange(self, micro_batch: int) -> Callable[[Any], Any]:
        """Returns the function that turns a staged micro-batch into rows [M, L] in a program."""


class AtomRows:
    """The atoms of batches of a shape.

    Args:
      num_rows: r.

    Attributes:
      form: of an atom's rows, [r, L].
      num_atoms: of a device, in a batch of all micro-batches.
    """

    def __init__(
        self, programs: DevicePrograms, placement: RowPlacement, shape: BatchShape, num_rows: int
    ) -> None:
        self._programs = programs
        arrange, staged = placement.arrange(shape.micro_batch), placement.abstract_batch(shape)

        def arrange_all(batch: Batch) -> tuple[Batch, jax.Array | None]:
            arranged: Batch = jax.lax.map(arrange, batch)
            most = jnp.int32(shape.max_micro_batches)
            return arranged, None if batch.begins is None else num_passes(arranged, most)

        self._arrange = None
        of_shape = f"{shape.micro_batch}-{shape.max_micro_batches}"
        if isinstance(staged.tokens, tuple):  # of load expansion
            out = (placement.final, programs.whole)
            self._arrange = programs.on_mesh(f"arrange-{of_shape}", arrange_all, staged, out=out)
        per_device = shape.micro_batch // programs.mesh.size
        self._atoms_per_pass = per_device // num_rows
        self.num_atoms = self._atoms_per_pass * shape.max_micro_batches
        batch, self.form = (
            type(staged)(
                *(None if x is None else form((*size, x.shape[-1]), x.dtype) for x in of_slots)
            )
            for of_slots in [[x[0] if isinstance(x, tuple) else x for x in staged]]
            for size in ((shape.max_micro_batches, per_device), (num_rows,))
        )

        def take(batch: Batch, j: jax.Array, k: jax.Array) -> Batch:
            taken: Batch = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x[j], k * num_rows, num_rows), batch
            )
            return taken

        index = form((), jnp.int32)
        self._take = programs.on_devices(f"take-{of_shape}", take, (batch, index, index))

    def of(self, batch: Batch, num_micro_batches: int) -> Iterator[dict[jax.Device, Batch]]:
        """Yields the atoms of a batch's first micro-batches, one on each of this host's devices at
        a time.
        """
        programs = self._programs
        rows = batch
        if self._arrange is not None:
            rows, held = programs.run(self._arrange, batch)
            if held is not None:  # a host without rows does not know how many lengths need
                num_micro_batches = int(on(programs.devices[0], held))
        rows_here = {device: on(device, rows) for device in programs.devices}
        for j in range(num_micro_batches):
            for k in range(self._atoms_per_pass):
                yield {
                    device: self._take[device](rows_here[device], np.int32(j), np.int32(k))
                    for device in programs.devices
                }
