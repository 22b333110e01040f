"""Local checkpoints: each host keeps its newest shards on its own disk or RAM disk, between
checkpoints of `run_dir`.

Every host writes the blocks on its devices to its own folder, `DIRECTORY/RUN/host-INDEX/STEP`. If
no other host (with several slices: no other slice) holds a block, the next one keeps a second copy,
sent through the devices. A state is usable only if the hosts of a restart have all its blocks
together, so all hosts commit it or none does; the mesh and the hosts that wrote it do not matter.
Hosts send each other missing blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.hosts import broadcast, gather
from maxbatch.parallel.mesh import num_slices, slice_of
from maxbatch.run.compile.background import Background, MakeExecutable, compile_here
from maxbatch.run.folder.metrics import line_digests_at
from maxbatch.run.folder.position import CheckpointRecord, DamagedError, Position
from maxbatch.run.folder.run_id import RunIdentity
from maxbatch.run.weights.checkpoints import Checkpoints, Restored
from maxbatch.run.weights.local_files import (
    LostState,
    StoredPart,
    forget_whole,
    note_whole,
    read_part,
    run_name,
    state_folders,
    write_part,
)
from maxbatch.run.weights.shard_files import (
    ArrayForm,
    Spans,
    block_of,
    bytes_of,
    cut,
    missing_array,
    num_bytes,
    read_blocks,
    sides,
)
from maxbatch.run.weights.shards import assembled, blocks_here, common, forms_of, spans_of
from maxbatch.system.errors import reason, writing
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.storage import AnyPath, as_path, remove_tree
from maxbatch.update.state import TrainState

_MOST_SENT = 64 << 20  # bytes per transfer from one host to the others


class LocalState(NamedTuple):
    """A saved state whose blocks are all on the current hosts."""

    record: CheckpointRecord
    forms: tuple[ArrayForm, ...]
    held: list[set[str]]  # by host: the names of its blocks

    @property
    def step(self) -> int:
        """Completed updates."""
        return self.record.position.step


class LocalCheckpoints:
    """The local checkpoints of one run; all hosts call its methods together.

    Args:
      directory: `local_checkpoint_directory`, per host or shared by several.
      run_dir: the run's folder; names the folder of its states.
      identity: the run's identity; states of another run with the same `run_dir` are removed.
      checkpoints: the run's checkpoints, which make and check records.
      warn: called for unusable states and failed saves.

    Raises:
      ConfigError: the folder cannot be made.
    """

    def __init__(
        self,
        directory: str,
        run_dir: AnyPath,
        identity: RunIdentity,
        checkpoints: Checkpoints,
        warn: Callable[[str], None],
    ) -> None:
        self._run_dir, self._identity, self._checkpoints, self._warn = (
            run_dir,
            identity,
            checkpoints,
            warn,
        )
        self._folder = Path(str(as_path(directory))) / broadcast(partial(run_name, run_dir))
        self._own = self._folder / f"host-{jax.process_index()}"
        with writing(f"local_checkpoint_directory={directory}", "give another folder"):
            self._own.mkdir(parents=True, exist_ok=True)
        self._writer = ThreadPoolExecutor(1, "maxbatch-local-checkpoint")
        self._written: tuple[int, Future[None]] | None = None  # the current save
        self._has_warned = False  # of failed saves since the last success
        # by array: sends blocks to the next host
        self._passing: dict[int, Future[jax.stages.Compiled]] = {}
        self._parts: list[StoredPart] = []
        self._damages: dict[int, str] = {}  # faults of unusable states, by step
        self._foreign: set[int] = set()  # steps of another run's states
        self.states = self._look()  # newest first

    # --- finding ---

    def _look(self) -> list[LocalState]:
        """Returns the whole states, newest first."""
        parts, torn = [], {}
        for folder in state_folders(self._folder):
            try:
                parts.append(read_part(folder))
            except DamagedError as error:
                torn[int(folder.name)] = str(error)
        self._parts = parts

        offers: list[list[Any]] = gather(
            [
                [part.record.to_json(), part.arrays.forms, sorted(part.arrays.places)]
                for part in parts
            ]
        )
        for host, steps in enumerate(gather(torn)):
            self._damages |= {int(step): f"{why} on host {host}" for step, why in steps.items()}
        offers = [
            [offer for offer in offered if self._is_own(CheckpointRecord.from_json(offer[0]))]
            for offered in offers
        ]

        states: dict[str, LocalState] = {}
        for host, offered in enumerate(offers):
            for saved, forms, names in offered:
                arrays = tuple(ArrayForm(name, tuple(shape), dtype) for name, shape, dtype in forms)
                nothing = [set[str]() for _ in offers]
                state = LocalState(CheckpointRecord.from_json(saved), arrays, nothing)
                states.setdefault(_key(state.record, arrays), state).held[host].update(names)

        whole = []
        for state in sorted(states.values(), key=lambda state: -state.step):
            if why := self._fault(state):
                self._damages[state.step] = why
            else:
                self._checkpoints.check_identity(
                    state.record, f"its local checkpoint of step {state.step}"
                )
                whole.append(state)
        return whole

    def _is_own(self, record: CheckpointRecord) -> bool:
        """Returns whether a state is this run's; records the steps of other runs'."""
        is_own = self._identity.wrote(record.run_id)
        if not is_own:
            self._foreign.add(record.position.step)
        return is_own

    def _fault(self, state: LocalState) -> str | None:
        """Returns the fault of a state; None if it is whole and this run's."""
        if name := missing_array(state.forms, set[str]().union(*state.held)):
            damaged = self._damages.get(state.step)
            return f"no host has the whole of {name}" + (f"; {damaged}" if damaged else "")
        recorded = broadcast(partial(line_digests_at, self._run_dir, state.step))
        if state.record.position.samples_seen not in (samples_seen for samples_seen, _ in recorded):
            return "metrics.jsonl has no line of it"
        line = state.record.line
        if line is not None and line not in (digest for _, digest in recorded):
            return "its updates were trained again by another start"
        return None

    @property
    def lost(self) -> LostState | None:
        """The newest state that cannot be used; None if all can."""
        step = max(self._damages, default=None)
        return None if step is None else LostState(step, self._damages[step])

    # --- restoring ---

    def restore(
        self, state: LocalState, abstract: TrainState, make: MakeExecutable
    ) -> Restored | None:
        """Restores a state onto the shardings of `abstract`; None if damaged, which `resumed`
        reports.
        """
        arrays, damage = self._read(state, abstract.saved)
        if arrays is not None:
            damage = self._checkpoints.damage_of(state.record, arrays, abstract, make)
        if damage or arrays is None:
            self._damages[state.step] = damage or "it cannot be read"
            return None
        return Restored(arrays, state.record.position)

    def _read(
        self, state: LocalState, abstract: TrainState
    ) -> tuple[TrainState | None, str | None]:
        """Returns the arrays, or None and their damage."""
        leaves, tree = jax.tree.flatten(abstract)
        if forms_of(abstract) != state.forms:
            return None, "its arrays are those of another optimizer"
        mine = [
            part
            for part in self._parts
            if _key(part.record, part.arrays.forms) == _key(state.record, state.forms)
        ]

        here, blocks = jax.process_index(), dict[str, np.ndarray]()
        wanted = _wanted(leaves, set[str]().union(*state.held), len(state.held))

        # damaged copies are given up until every needed block is sound somewhere
        while True:
            if name := missing_array(state.forms, set[str]().union(*state.held)):
                return None, f"no host has a sound copy of {name}"
            sent = _senders(wanted, state.held)
            needed = {
                name
                for name in (wanted[here] & state.held[here]) | sent[here]
                if name not in blocks
            }
            for part in mine:  # the first sound copy
                left = needed - blocks.keys()
                blocks |= read_blocks(part.arrays, left & part.arrays.places.keys())[0]
            bad = [set(names) for names in gather(sorted(needed - blocks.keys()))]
            if not any(bad):
                break
            for host, names in enumerate(bad):
                state.held[host].difference_update(names)
                if names:
                    self._warn(
                        f"local checkpoint {state.step}: {len(names)} of the blocks of host "
                        f"{host} do not match their checksums; other copies are used where there "
                        "are any"
                    )

        for host, names in enumerate(sent):
            blocks |= _sent(host, sorted(names), state.forms, blocks, wanted[here])

        by_array: dict[int, list[tuple[Spans, np.ndarray]]] = defaultdict(list)
        for name, block in blocks.items():
            array, spans = block_of(name)
            by_array[array].append((spans, block))
        made = [assembled(leaf, by_array[array]) for array, leaf in enumerate(leaves)]
        arrays: TrainState = jax.tree.unflatten(tree, made)
        return arrays, None

    def resumed(self, step: int) -> None:
        """Warns of states newer than the step where the run continues, and removes them.

        Later starts must not use them, since the updates after `step` are redone.
        """
        for other, why in sorted(self._damages.items(), reverse=True):
            if other > step:
                self._warn(
                    f"local checkpoint {other} cannot be used ({why}); training continues from "
                    f"step {step}"
                )
        if self._foreign:
            steps = ", ".join(map(str, sorted(self._foreign)))
            self._warn(
                f"{self._folder}: has local checkpoints of another run that had this run_dir "
                f"(step {steps}), which are removed; training continues from step {step}"
            )

        gather(None)  # wait until hosts that share the path have read what they need
        foreign = {
            part.arrays.folder
            for part in self._parts
            if not self._identity.wrote(part.record.run_id)
        }
        for folder in state_folders(self._folder):
            if int(folder.name) > step or folder in foreign:
                remove_tree(folder)
        for unfinished in self._folder.glob(f"host-*/{BUILDING}*"):
            remove_tree(unfinished)

        forget_whole(self._folder)
        gather(None)  # from here on, no host removes another's writes
        whole = (
            state.step
            for state in self.states
            if state.step <= step and state.step not in self._damages
        )
        if newest := max(whole, default=None):
            note_whole(self._own, newest)
        self._parts = []

    # --- saving ---

    def compile(self, abstract: TrainState, background: Background) -> None:
        """Starts compiling the programs of a save, ahead of the first one."""
        programs: dict[object, Future[jax.stages.Compiled]] = {}
        for array, leaf in enumerate(jax.tree.leaves(abstract.saved)):
            if not _needs_a_copy(leaf):
                continue
            form = (leaf.shape, leaf.dtype, leaf.sharding)
            if form not in programs:
                lower = partial(_passed_on(leaf.sharding).lower, leaf)
                programs[form] = background.start(partial(compile_here, "second copies", lower))
            self._passing[array] = programs[form]

    def save(self, state: TrainState, position: Position, line: str | None) -> None:
        """Starts a save; returns when the arrays may be overwritten. `settle` waits for the files.

        Args:
          line: the `line_digest` of the last update, by which a restart recognises it in
            `metrics.jsonl`.
        """
        self.settle()
        record = self._checkpoints.record_of(state, position, line=line)
        leaves = jax.tree.leaves(state.saved)
        blocks = blocks_here(leaves, of_all_hosts=False)
        programs = {array: program.result() for array, program in self._passing.items()}
        gather(None)  # so that no host waits inside a program that another still compiles
        for array, program in programs.items():
            sent = program(leaves[array])
            blocks |= {
                name: x for name, x in _received(array, leaves[array], sent) if name not in blocks
            }
        folder, forms = self._own / str(position.step), forms_of(state.saved)
        self._written = (
            position.step,
            self._writer.submit(write_part, folder, record, forms, blocks),
        )

    def settle(self) -> None:
        """Waits until all hosts have written the last save; if one failed, all discard it."""
        if self._written is None:
            return
        (step, under_way), self._written = self._written, None
        error = under_way.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        failures = gather(reason(error) if error else None)
        failed = next(((host, why) for host, why in enumerate(failures) if why), None)
        if failed is None:
            self._has_warned = False
            note_whole(self._own, step)
            for folder in state_folders(self._folder):
                if int(folder.name) < step:
                    remove_tree(folder)
            return
        remove_tree(self._own / str(step))
        if not self._has_warned:
            self._warn(
                f"the local checkpoint of step {step} is not kept ({self._folder} on host "
                f"{failed[0]}: {failed[1]}); training continues with the one before"
            )
        self._has_warned = True

    def remove(self) -> None:
        """Removes the states of a complete run, whose last checkpoint is in `run_dir`."""
        self.settle()
        gather(None)
        remove_tree(self._folder)

    def close(self) -> None:
        """Waits for the current file."""
        self._writer.shutdown()


def _key(record: CheckpointRecord, forms: Iterable[ArrayForm]) -> str:
    """Returns a key that is equal only for blocks of the same state."""
    return f"{record.to_json()['json_checksum']} {tuple(forms)}"


# --- second copies ---


def _host(device: jax.Device) -> int:
    index: int = device.process_index
    return index


def _needs_a_copy(leaf: Any) -> bool:
    """Returns whether any block of an array is on a single host, or a single slice, of several."""
    devices = list(leaf.sharding.mesh.devices.flat)
    # The unit of loss: a slice if there are several, else a host.
    unit = slice_of if num_slices(devices) > 1 else _host
    holders: dict[Spans, set[int]] = defaultdict(set)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders[spans_of(index, leaf.shape)].add(unit(device))
    has_others = len({unit(device) for device in devices}) > 1
    return has_others and any(len(units) < 2 for units in holders.values())


def _next_places(sharding: NamedSharding) -> list[int]:
    """Returns, for each mesh position, the position of the device with the second copy of its
    block.

    It is the device of the same index on the next host, or on the host of the same index in the
    next slice.
    """
    devices = list(sharding.mesh.devices.flat)
    hosts: dict[int, list[int]] = defaultdict(list)
    for place, device in enumerate(devices):
        hosts[_host(device)].append(place)
    ordered = [hosts[host] for host in sorted(hosts)]
    shift = len(ordered) // num_slices(devices) % len(ordered) or 1
    following = ordered[shift:] + ordered[:shift]
    pairs = zip(chain.from_iterable(ordered), chain.from_iterable(following), strict=True)
    return [after for _, after in sorted(pairs)]


def _passed_on(sharding: NamedSharding) -> jax.stages.Wrapped:
    """Returns a program that sends each block of an array onwards; its result has the blocks side
    by side.
    """
    axes, pairs = sharding.mesh.axis_names, list(enumerate(_next_places(sharding)))

    def send(block: jax.Array) -> jax.Array:
        passed: jax.Array = jax.lax.ppermute(block, axes, pairs)
        return passed[None]

    sent = jax.shard_map(
        send, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=P(axes), check_vma=False
    )
    return jax.jit(sent)


def _received(array: int, leaf: jax.Array, sent: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the blocks received by this host's devices."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding), "the state lies on the mesh"
    devices, indices = list(sharding.mesh.devices.flat), sharding.devices_indices_map(leaf.shape)
    sources = {after: devices[place] for place, after in enumerate(_next_places(sharding))}
    for shard in sent.addressable_shards:
        source = sources[devices.index(shard.device)]
        yield from cut(array, spans_of(indices[source], leaf.shape), np.array(shard.data)[0])


# --- other hosts, and another mesh ---


def _wanted(
    leaves: Iterable[jax.ShapeDtypeStruct], names: Iterable[str], num_hosts: int
) -> list[set[str]]:
    """Returns the blocks needed by each host's devices."""
    blocks: dict[int, dict[Spans, str]] = defaultdict(dict)
    for name in names:
        array, spans = block_of(name)
        blocks[array][spans] = name
    wanted = [set[str]() for _ in range(num_hosts)]
    for array, leaf in enumerate(leaves):
        targets = {
            (device.process_index, spans_of(index, leaf.shape))
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
        }
        for host, target in targets:
            if target in blocks[array]:  # same mesh as before
                wanted[host].add(blocks[array][target])
            else:
                wanted[host].update(
                    name
                    for spans, name in blocks[array].items()
                    if common(spans, target) is not None
                )
    return wanted


def _senders(wanted: list[set[str]], held: list[set[str]]) -> list[set[str]]:
    """Returns the blocks that each host sends to hosts that lack them."""
    sent = [set[str]() for _ in held]
    for mine, has in zip(wanted, held, strict=True):
        for name in mine - has:
            sent[next(host for host, names in enumerate(held) if name in names)].add(name)
    return sent


def _sent(
    host: int,
    names: list[str],
    forms: tuple[ArrayForm, ...],
    blocks: Mapping[str, np.ndarray],
    wanted: set[str],
) -> dict[str, np.ndarray]:
    """Receives the blocks that one host sends and this one wants; all hosts call it.

    They go through the devices in pieces of equal size, so that one program sends them all.
    """
    sizes = [num_bytes(forms, name) for name in names]
    total = sum(sizes)
    piece = min(_MOST_SENT, -(-total // 4) * 4)
    content = np.zeros(-(-total // piece) * piece if total else 0, np.uint8)
    if host == jax.process_index() and names:
        content[:total] = np.concatenate([bytes_of(blocks[name]) for name in names])
    for first in range(0, len(content), piece or 1):
        words = content[first : first + piece].view(np.uint32)
        words[:] = multihost_utils.broadcast_one_to_all(
            words, is_source=host == jax.process_index()
        )
    received, end = {}, 0
    for name, size in zip(names, sizes, strict=True):
        if name in wanted:
            array, spans = block_of(name)
            block = content[end : end + size].copy().view(np.dtype(forms[array].dtype))
            received[name] = block.reshape(sides(spans))
        end += size
    return received
