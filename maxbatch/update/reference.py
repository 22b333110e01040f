"""The reference of an objective: figures of each sample under the first parameters.

They are computed once, before the first update, and read beside the samples. These are types
alone: the kind of sample that has such an objective brings the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.placement import Batch, BatchShape, Placement
from maxbatch.data.stream.stream import ReadPart, Stream
from maxbatch.parallel.trees import State
from maxbatch.system.storage.storage import AnyPath


class SampleRange(NamedTuple):
    """Samples of a stream."""

    stream: Stream | None  # None on a host that reads no rows
    first: int
    end: int


class ReferencePass(Protocol):
    """A forward pass over samples with given parameters."""

    @property
    def name(self) -> str:
        """Name of the compiled program."""

    @property
    def placement(self) -> Placement:
        """The placement of its batches."""

    @property
    def shape(self) -> BatchShape:
        """The shape of its batches, of one micro-batch."""

    def figures_on(self, mesh: Mesh) -> Callable[[State, Batch], Any]:
        """Returns the function (parameters, arranged samples) -> figures, for programs on a
        mesh.
        """

    def lower(self, abstract_params: State) -> jax.stages.Lowered:
        """Lowers the program (parameters, batch) -> figures, whole on every device."""

    def __call__(self, score: Callable[[Batch], Any], samples: SampleRange) -> Any:
        """Returns the figures of samples; `score` computes those of a batch."""


class FoundReference(Protocol):
    """The reference of a run as an earlier start left it."""

    @property
    def missing(self) -> Sequence[SampleRange]:
        """Samples without a reference."""

    @property
    def introduction(self) -> str:
        """A line of what is computed for the missing samples."""

    def complete(self, figures_of: Callable[[SampleRange], Any]) -> None:
        """Adds the missing samples, whose figures a pass gives."""

    def changed_file(self) -> tuple[str, bytes] | None:
        """Returns the name and the content of its file in the run folder; None: it is there."""

    def beside(self, stream: Stream) -> Stream:
        """Adds `reference`, float32[W], to the samples of a stream."""


class Reference(Protocol):
    """The reference of an objective."""

    def find(
        self, folder: AnyPath, mark: str, resumes: bool, read: ReadPart, held_out: ReadPart
    ) -> FoundReference:
        """Finds the reference of all samples that a run reads.

        Args:
          folder: the run folder.
          mark: of the first parameters (`RunOrigin.mark`).
          resumes: whether the run has a checkpoint.
        """

    def make_pass(
        self, config: UpdateConfig, placement: Placement, batch_size: int
    ) -> ReferencePass:
        """Returns a pass over samples without a reference, `batch_size` at a time."""
