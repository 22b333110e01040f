"""Log-probabilities of answers under the reference: the first parameters of a run, computed once.

They are keyed by the sample's hash, beside the stream, so any cut of the data and any epoch finds
them. A run computes them for its samples in one pass before the first update, and writes them to
`run_dir/reference.bin`; a resume reads the file. If it is missing or damaged, or the run is longer
now, the first parameters are made again from the config for the missing samples.

Cost: a forward pass over each sample; 8 bytes per sample and 4 per answer, in every loading host's
memory and in the file.

Shapes: M samples per pass, A answers per sample (2 of a pair), W = A L slots, K known samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.feed import BatchLoader, in_passes
from maxbatch.data.feed.placement import Batch, BatchShape, Placement
from maxbatch.data.stream.epochs import SampleOrigin
from maxbatch.data.stream.rows import RowArrays, RowDocument
from maxbatch.data.stream.samples import Indices, SampleRows
from maxbatch.data.stream.stream import ReadPart, Stream
from maxbatch.kinds.pair.scored_answers import rows_of_answers, sum_by_answer
from maxbatch.parallel.hosts import broadcast, gather, warn
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.run.folder.run_folder import REFERENCE_FILE
from maxbatch.system.errors import TrainingError
from maxbatch.system.hashing import row_hashes
from maxbatch.system.storage.storage import AnyPath
from maxbatch.system.terminal.folding import counted
from maxbatch.update.model_on_mesh import ModelOnMesh
from maxbatch.update.reference import SampleRange

Figures = tuple[np.ndarray, np.ndarray]  # of n samples: hashes, uint64[n], and float32[n, A]
_READ_SAMPLES = 1024  # samples per read, when looking for unknown ones


@dataclasses.dataclass
class KnownAnswers:
    """The known log-probabilities.

    Attributes:
      unit: the kind of sample, in a word.
      num_answers: A.
      num_samples: known samples of the training stream, from its start.
      num_held_out: known samples of the held-out stream.
      held_out: a hash of the held-out stream's identity.
      origin: a hash of the first parameters' identity.
      hashes_K: uint64, the samples' hashes, ascending.
      logprobs_KxA: float32, sums over each answer's tokens; of a pair: chosen, rejected.
    """

    unit: str
    num_answers: int
    num_samples: int = 0
    num_held_out: int = 0
    held_out: str = ""
    origin: str = ""
    hashes_K: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint64))
    logprobs_KxA: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        self.logprobs_KxA = self.logprobs_KxA.reshape(len(self.hashes_K), self.num_answers)

    def add(self, hashes_n: np.ndarray, logprobs_nxA: np.ndarray) -> None:
        """Adds samples; some may be known already."""
        hashes = np.concatenate([self.hashes_K, hashes_n])
        self.hashes_K, first_K = np.unique(hashes, return_index=True)
        self.logprobs_KxA = np.concatenate([self.logprobs_KxA, logprobs_nxA])[first_K]

    def beside(self, rows: RowArrays) -> RowArrays:
        """Returns rows with `reference`, float32[n, W]: each sum in the first slot of its answer's
        row.
        """
        place_n, known_n = self._places(_hashes(rows))
        if not known_n.all():
            raise TrainingError(
                f"{np.sum(~known_n)} of {len(known_n)} {self.unit}s are not in the reference: the "
                f"data changed while they were read; remove {REFERENCE_FILE} of the run and start "
                "again, and it is computed anew"
            )
        width = rows["tokens"].shape[1] // self.num_answers
        reference = np.zeros((len(place_n), self.num_answers, width), np.float32)
        reference[:, :, 0] = self.logprobs_KxA[place_n]
        return rows | {"reference": reference.reshape(rows["tokens"].shape)}

    def knows(self, samples: SampleRows, count: int) -> bool:
        """Reads the first `count` samples of a stream; returns whether all are known."""
        batches = (
            range(first, min(first + _READ_SAMPLES, count))
            for first in range(0, count, _READ_SAMPLES)
        )
        return all(self._places(_hashes(samples.batch(list(batch))))[1].all() for batch in batches)

    def _places(self, hash_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of samples, int64[n], and whether they are known, bool[n]; others
        have any index.
        """
        if not len(self.hashes_K):
            return np.zeros(len(hash_n), np.int64), np.zeros(len(hash_n), bool)
        place_n = np.minimum(np.searchsorted(self.hashes_K, hash_n), len(self.hashes_K) - 1)
        return place_n, self.hashes_K[place_n] == hash_n

    def to_bytes(self) -> bytes:
        """Serialises to a line of JSON, with a checksum of the rest, and the two arrays."""
        arrays = self.hashes_K.astype("<u8").tobytes() + self.logprobs_KxA.astype("<f4").tobytes()
        facts = {
            name: getattr(self, name)
            for name in ("num_samples", "num_held_out", "held_out", "origin")
        }
        return (
            json.dumps(facts | {"pairs": len(self.hashes_K), "crc32": zlib.crc32(arrays)}).encode()
            + b"\n"
            + arrays
        )

    @classmethod
    def read(cls, path: AnyPath, unit: str, num_answers: int) -> KnownAnswers | None:
        """Reads a file; None if it is missing or damaged."""
        try:
            head, _, arrays = path.read_bytes().partition(b"\n")
            facts = json.loads(head)
            count = int(facts["pairs"])
            if facts["crc32"] != zlib.crc32(arrays) or len(arrays) != (8 + 4 * num_answers) * count:
                return None
            hashes_K = np.frombuffer(arrays, "<u8", count).astype(np.uint64)
            logprobs = np.frombuffer(arrays, "<f4", offset=8 * count).astype(np.float32)
            made_of = str(facts.get("held_out", "")), str(facts.get("origin", ""))
            counts = int(facts["num_samples"]), int(facts["num_held_out"])
            return cls(unit, num_answers, *counts, *made_of, hashes_K, logprobs)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def read_on_all_hosts(path: AnyPath, unit: str, num_answers: int) -> KnownAnswers | None:
    """Reads a file if every host can read it; else None."""
    answers = KnownAnswers.read(path, unit, num_answers)
    return answers if all(gather(answers is not None)) else None


def digest_of(identity: object) -> str:
    """Returns a hash of a stream's identity."""
    return hashlib.blake2b(
        json.dumps(identity, sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def _hashes(rows: RowArrays) -> np.ndarray:
    return _joined(row_hashes(np, rows["tokens"], rows["segments"], rows["weights"]))


def _joined(halves_nx2: np.ndarray) -> np.ndarray:
    """Joins hashes from low and high halves, uint32[n, 2], to uint64[n]."""
    low_n, high_n = halves_nx2.astype(np.uint64).T
    joined: np.ndarray = low_n | high_n << np.uint64(32)
    return joined


class ReferredRows:
    """A stream's samples with the reference's log-probabilities."""

    def __init__(self, samples: SampleRows, reference: KnownAnswers) -> None:
        self.samples, self.reference, self.row_length = samples, reference, samples.row_length

    def place(self, index: int) -> SampleOrigin:
        return self.samples.place(index)

    def batch(self, indices: Indices) -> RowArrays:
        """Returns samples by their indices, arrays [n, W]."""
        return self.reference.beside(self.samples.batch(indices))

    def lengths(self, indices: Indices) -> np.ndarray:
        return self.samples.lengths(indices)

    def stats(self) -> dict[str, object]:
        return self.samples.stats()

    def documents(self, index: int) -> list[RowDocument]:
        return self.samples.documents(index)

    def again(self, indices: Sequence[int], first: int, end: int) -> list[int]:
        return self.samples.again(indices, first, end)


@dataclasses.dataclass
class FoundAnswers:
    """The log-probabilities of a run as an earlier start left them.

    Attributes:
      known: the log-probabilities.
      mark: of the first parameters.
      missing: samples without a reference.
      is_other: whether the file states other held-out samples.
    """

    known: KnownAnswers
    mark: str
    missing: list[SampleRange]
    is_other: bool

    @property
    def introduction(self) -> str:
        count = counted(sum(end - first for _, first, end in self.missing), self.known.unit)
        return f"reference: log-probabilities of {count}, under the first parameters"

    def complete(self, figures_of: Callable[[SampleRange], Figures]) -> None:
        for samples in self.missing:
            self.known.add(*figures_of(samples))
        self.known.origin = self.mark

    def changed_file(self) -> tuple[str, bytes] | None:
        is_new = self.is_other or self.missing
        return (REFERENCE_FILE, self.known.to_bytes()) if is_new else None

    def beside(self, stream: Stream) -> Stream:
        return dataclasses.replace(stream, samples=ReferredRows(stream.samples, self.known))


@dataclasses.dataclass(frozen=True)
class AnswersReference:
    """The reference of samples with answers (`maxbatch.update.reference.Reference`).

    Attributes:
      unit: the kind of sample, in a word.
      num_answers: A.
    """

    unit: str
    num_answers: int

    def find(
        self, folder: AnyPath, mark: str, resumes: bool, read: ReadPart, held_out: ReadPart
    ) -> FoundAnswers:
        """Returns the log-probabilities of all samples that a run reads, as its file has them.

        A new run computes them from its parameters, whatever an attempt that was killed before its
        first checkpoint left.
        """
        path, new = folder / REFERENCE_FILE, KnownAnswers(self.unit, self.num_answers)
        known = read_on_all_hosts(path, self.unit, self.num_answers) if resumes else new
        if known is None or (known.origin and mark and known.origin != mark):
            why = "missing or damaged" if known is None else "of another run"
            warn(f"{path}: {why}; the reference is computed again from the first parameters")
            known = new
        stream = held_out.stream
        identity = broadcast(lambda: digest_of(stream.identity if stream is not None else None))
        is_other = identity != known.held_out  # other samples, or a file made before it stated them
        if is_other:
            is_known = all(
                gather(
                    known.knows(stream.samples, held_out.num_samples)
                    if stream is not None
                    else True
                )
            )
            known.num_held_out, known.held_out = held_out.num_samples if is_known else 0, identity
        ranges = [
            SampleRange(read.stream, known.num_samples, read.num_samples),
            SampleRange(stream, known.num_held_out, held_out.num_samples),
        ]
        known.num_samples = max(known.num_samples, read.num_samples)
        known.num_held_out = max(known.num_held_out, held_out.num_samples)
        missing = [samples for samples in ranges if samples.end > samples.first]
        return FoundAnswers(known, mark, missing, is_other)

    def make_pass(self, config: UpdateConfig, placement: Placement, batch_size: int) -> AnswersPass:
        return AnswersPass(config, placement, batch_size, self.num_answers)


class AnswersPass:
    """A forward pass over samples with given parameters.

    Args:
      config: the model, and the axes of its mesh.
      placement: placement of batches without a reference.
      batch_size: M.
      num_answers: A.

    Attributes:
      name: name of the compiled program.
      shape: of a batch.
    """

    def __init__(
        self, config: UpdateConfig, placement: Placement, batch_size: int, num_answers: int
    ) -> None:
        self._config, self._num_answers = config, num_answers
        self.placement, self.shape = placement, BatchShape(batch_size, 1)
        self.name = f"reference-{batch_size}"

    def figures_on(self, mesh: Mesh) -> Callable[[State, Batch], tuple[jax.Array, jax.Array]]:
        """Returns the function (parameters, samples [M, W]) -> hashes and log-probabilities, for
        programs on a mesh.
        """
        model = ModelOnMesh(self._config, self._config.mesh, mesh, BATCH_AXES)
        num_answers = self._num_answers

        def figures_of(params: State, rows: Batch) -> tuple[jax.Array, jax.Array]:
            of_answers = rows_of_answers(rows, num_answers)
            logprobs = model.token_logprobs(params, of_answers.tokens, of_answers.segments)
            answers = sum_by_answer(logprobs, of_answers.weights, num_answers)
            return row_hashes(jnp, rows.tokens, rows.segments, rows.weights), answers.logprobs_MxK

        return figures_of

    def lower(self, abstract_params: State) -> jax.stages.Lowered:
        mesh = self.placement.mesh
        arrange = self.placement.arrange(self.shape.micro_batch)
        figures_of = self.figures_on(mesh)

        def score(params: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
            return figures_of(
                params, arrange(jax.tree.map(lambda x: x.reshape(x.shape[1:]), batch))
            )

        batch = self.placement.abstract_batch(self.shape)
        jitted = jax.jit(score, out_shardings=NamedSharding(mesh, P()))
        lowered: jax.stages.Lowered = jitted.lower(abstract_params, batch)
        return lowered

    def __call__(
        self, score: Callable[[Batch], tuple[jax.Array, jax.Array]], samples: SampleRange
    ) -> Figures:
        """Returns hash and log-probabilities of samples: uint64[n], float32[n, A]."""
        stream, first, end = samples
        hashes, logprobs = [np.zeros(0, np.uint64)], [np.zeros((0, self._num_answers), np.float32)]
        with BatchLoader(stream, self.placement, in_passes(first, end, self.shape)) as loader:
            for num_rows, batch in loader.batches():
                halves_Mx2, logprobs_MxA = jax.device_get(score(batch))
                hashes.append(_joined(halves_Mx2[:num_rows]))
                logprobs.append(logprobs_MxA[:num_rows])
        return np.concatenate(hashes), np.concatenate(logprobs)
