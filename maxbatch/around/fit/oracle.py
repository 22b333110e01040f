"""The compiler as an oracle: does an update fit? Its verdicts are kept on disk, so each program is
compiled once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from maxbatch.around.compile.compiling import compiled, programs_of
from maxbatch.around.compile.modelled import Modelled
from maxbatch.around.fit.meshes import mesh_text
from maxbatch.around.fit.search import Line
from maxbatch.config.config import Config
from maxbatch.config.keys import Fixes
from maxbatch.config.pins import program_keys
from maxbatch.config.recipes import slots_per_row
from maxbatch.config.sections import REMAT_TENSORS, names_fixing
from maxbatch.data.feed.placement import BatchShape
from maxbatch.data.store.cache_folder import cache_folder
from maxbatch.families.cycle import cycle_of
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.experts import moe_mlp_dim
from maxbatch.families.matrices import MATRICES, forms_of, parameters, shape_of
from maxbatch.families.parameter import LAYERS
from maxbatch.parallel.remat import CONTEXT, INPUT, Remat
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.run.compile.compiler import Shortage
from maxbatch.run.compile.memory import Memory, Parts, Verdict, known_parts
from maxbatch.run.compile.saved import versions
from maxbatch.run.compile.target import Target, device_facts
from maxbatch.run.programs import Programs
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.bounded import read_json

_FORMAT = 4  # version of an answer on disk

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_compiling = threading.Semaphore(CORES)  # one compilation keeps about one core busy
_tracing = threading.Lock()


class Asked(NamedTuple):
    """A verdict, from disk or from the compiler."""

    verdict: Verdict
    cached: bool
    modelled: Modelled  # of a program that fits, without its operations


class CompilerOracle:
    """The compiler, asked whether the update of a config fits with batches of given shapes.

    The batch keys of the config are ignored; `say` is called with a line of text before each
    compilation: the program and the verdicts so far.
    """

    def __init__(
        self, config: Config, target: Target, mesh: MeshShape, say: Callable[[str], None]
    ) -> None:
        self.config, self.target, self.mesh, self._say = config, target, mesh, say
        self.asked: dict[BatchShape, Asked] = {}
        self._folder = cache_folder(config.data_cache_dir, "fit")
        identity = {
            "format": _FORMAT,
            # The shape defines the batch.
            "keys": {
                k: v for k, v in program_keys(config).items() if k not in names_fixing(Fixes.BATCH)
            },
            **({} if config.max_tokens_per_pass is None else {"shares_rows": True}),
            "versions": versions(target.devices[0].platform),
            "target": [target.name, device_facts(target.devices), target.memory_bytes],
        }
        self._identity = json.dumps(identity, sort_keys=True)

    @cached_property
    def _programs(self) -> Programs:
        return programs_of(self.config, self.target, self.mesh)

    def ask(self, *shapes: BatchShape) -> list[Verdict]:
        """Returns the verdicts on batches of these shapes, compiled in parallel if there are
        cores.
        """
        new = [shape for shape in shapes if shape not in self.asked]
        with ThreadPoolExecutor(max(1, len(new)), "maxbatch-fit") as pool:
            self.asked.update(zip(new, pool.map(self._find_out, new), strict=True))
        return [self.asked[shape].verdict for shape in shapes]

    def _find_out(self, shape: BatchShape) -> Asked:
        digest = hashlib.sha256(f"{self._identity}{list(shape)}".encode()).hexdigest()[:32]
        path = self._folder / f"{digest}.json"
        known = _read(path)
        if known is not None:
            return known
        with _compiling:
            with _tracing:
                lowered = self._programs.step(shape)
            self._say(
                f"compiling a micro-batch of {shape.micro_batch:,}, {shape.max_micro_batches} of "
                f"them, {mesh_text(self.mesh, self.config)} "
                f"remat_policy={self.config.remat_policy}, for {self.target.name}{self._bounds()}"
            )
            verdict, _, timed = compiled(lowered, self.target, self.config, shape)
        modelled = dataclasses.replace(timed, operations=())
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = {"verdict": dataclasses.asdict(verdict), "modelled": dataclasses.asdict(modelled)}
        write_atomically(path, json.dumps(answer))
        return Asked(verdict, False, modelled)

    def _bounds(self) -> str:
        """Returns the verdicts so far, for the end of a message."""
        verdicts = {shape.micro_batch: asked.verdict.fits for shape, asked in self.asked.items()}
        fits, fails = (
            [rows for rows, is_fit in verdicts.items() if is_fit is wanted]
            for wanted in (True, False)
        )
        said = [f"{max(fits):,} fits"] if fits else []
        said += [f"{min(fails):,} does not"] if fails else []
        return f"; so far {', '.join(said)}" if said else ""

    def parts(self, shape: BatchShape, verdict: Verdict) -> Parts:
        """Returns the memory of one device by kind."""
        known = self._known_parts(shape)
        rest = (verdict.needed_bytes or 0) - sum(dataclasses.astuple(known))
        return dataclasses.replace(known, activations=max(0, rest))

    def estimate(self) -> Line:
        """Returns an estimate of memory before any compilation: state, gradients, and activations
        per row.
        """
        shards = self.mesh.batch_shards
        known = self._known_parts(BatchShape(shards, 1))
        fixed = known.parameters + known.optimizer + known.gradients
        return Line(fixed, _activation_bytes(self.config, self.mesh.sizes) / shards)

    def _known_parts(self, shape: BatchShape) -> Parts:
        return known_parts(
            self._programs.abstract, self._programs.trained_placement.abstract_batch(shape)
        )


def _activation_bytes(config: Config, axes: dict[str, int]) -> float:
    """Returns roughly the bytes of one row per batch shard: what all layers keep and what one layer
    works with.

    A layer, or a cycle of several forms, keeps its input, and what its policy names; under `none`
    about twice the outputs of its matrices.
    """
    model = config.model
    rows = [row for row in parameters(model) if row.kept]
    sizes = dict.fromkeys(REMAT_TENSORS, 0)
    for row in (row for row in rows if row.path[0] == LAYERS):
        outputs = math.prod(shape_of(row, model)[axis] for axis in row.groups[1])
        sizes[row.kept] += outputs * (model.num_experts_per_tok if row.per_expert else 1)
    of_experts, cycle = model.num_experts_per_tok * moe_mlp_dim(model), cycle_of(model)
    experts = FAMILIES[model.decoder_block].experts
    is_beside = experts is not None and experts.are_beside_mlp
    inner = sum(of_experts * form.has_experts for form in cycle)
    inner += sum(model.base_mlp_dim for form in cycle if is_beside or not form.has_experts)
    products = sum(sizes.values()) + inner
    sizes |= {CONTEXT: sizes[MATRICES["query"].kept], INPUT: 0}
    remat = Remat.of(config.remat)
    kept = 0 if INPUT in remat.on_host else model.base_emb_dim
    kept += 2 * products if remat.keeps_all else sum(sizes[name] for name in remat.on_device)
    value = 2 if config.dtype == "bfloat16" else 4
    beside = sum(form.values_beside for form in forms_of(model))
    per_layers = (
        kept * config.base_num_decoder_layers // len(cycle)
        + beside * config.base_num_decoder_layers
    )
    per_token = value * (per_layers + 4 * products)
    per_device: float = (
        per_token * slots_per_row(config) / (axes["tensor"] * axes["context"] * axes["pipeline"])
    )
    return per_device


def _read(path: Path) -> Asked | None:
    try:
        record = read_json(path, str(path), finite=False)
        verdict, modelled = record["verdict"], Modelled(**record["modelled"])
        memory, lacks = verdict.pop("memory"), Shortage(*verdict.pop("lacks"))
        return Asked(
            Verdict(**verdict, memory=Memory(**memory) if memory else None, lacks=lacks),
            True,
            modelled,
        )
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ):  # missing or damaged: the program is compiled again
        return None
