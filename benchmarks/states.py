"""Saving and restoring a state, in each of several checkouts: `python -m benchmarks.states CHECKOUT
[CHECKOUT ...]`.

Hosts are processes of one device each. A state is saved into a run folder on a disk and in both
emulated stores, and as a local checkpoint; then it is restored, checksums included, onto the same
mesh and onto one whose axes are swapped. Checkouts take turns, so that other load affects all of
them. The first save of a process compiles and is not measured. Needs the emulators of the `test`
extra.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLACES = ("disk", "local", "gs", "s3")
FIGURES = {
    "save_blocks_s": "training waits, s",
    "save_s": "save, s",
    "save_cpu_s": "save, CPU seconds of all hosts",
    "restore_s": "restore, s",
    "restore_cpu_s": "restore, CPU seconds of all hosts",
    "restore_turned_s": "onto a mesh with other axes, s",
    "restore_turned_cpu_s": "onto a mesh with other axes, CPU seconds",
    "megabytes": "stored, MB",
    "peak_megabytes": "most memory beyond the state, MB",
    "save_requests": "requests of a save",
    "restore_requests": "requests of a restore",
}
_NUM_ARRAYS, _LAYERS, _COLUMNS = 12, 8, 512


def main(argv: list[str] | None = None) -> int:
    """Measures all checkouts and prints a table per place; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.states", description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument(
        "--megabytes",
        type=int,
        default=600,
        help="of the state, parameters and two moments together",
    )
    parser.add_argument(
        "--megabytes-in-stores", type=int, default=96, help="the emulators keep objects in memory"
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    for place in arguments.places:
        megabytes = (
            arguments.megabytes if place in ("disk", "local") else arguments.megabytes_in_stores
        )
        found: dict[Path, list[dict[str, float]]] = {
            checkout: [] for checkout in arguments.checkouts
        }
        for turn in range(arguments.turns):
            for checkout in arguments.checkouts[:: -1 if turn % 2 else 1]:
                found[checkout].append(measure(checkout, place, megabytes, arguments.hosts))
        console.print(
            _table(
                f"{place}: {megabytes} MB, {arguments.hosts} hosts, median of {arguments.turns}",
                found,
            )
        )
    return 0


def _table(title: str, found: dict[Path, list[dict[str, float]]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for checkout in found:
        table.add_column(checkout.name, justify="right")
    for figure, name in FIGURES.items():
        medians = [
            statistics.median(turn[figure] for turn in turns if figure in turn)
            if figure in turns[0]
            else None
            for turns in found.values()
        ]
        if any(median is not None for median in medians):
            table.add_row(name, *("" if median is None else f"{median:.2f}" for median in medians))
    return table


def measure(checkout: Path, place: str, megabytes: int, num_hosts: int) -> dict[str, float]:
    """Returns the figures of one save and two restores with the package of a checkout."""
    from maxbatch.system.processes.ports import free_port
    from tests.helpers.stores import serving

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maxbatch-states-")))
        run_dir = str(folder / "run")
        environment = os.environ | {
            "PYTHONPATH": str(checkout),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
        }
        if place in ("gs", "s3"):
            store = stack.enter_context(serving(place))
            run_dir = store.bucket() + "/run"
            environment |= store.environment | {"STATES_STORE_PORT": str(store.port)}
        environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
        command = [
            sys.executable,
            "-P",
            __file__,
            "--host",
            place,
            run_dir,
            str(folder),
            str(megabytes),
        ]
        hosts = [
            subprocess.Popen(
                command,
                env=environment
                | {"JAX_NUM_PROCESSES": str(num_hosts), "JAX_PROCESS_ID": str(host)},
                stdout=subprocess.PIPE if host == 0 else subprocess.DEVNULL,
                stderr=None if host == 0 else subprocess.DEVNULL,
                text=True,
                cwd=folder,
            )
            for host in range(num_hosts)
        ]
        output, _ = hosts[0].communicate()
        for other in hosts[1:]:
            other.kill()  # they have finished if the first one has; without it JAX aborts them
            other.wait()
        if hosts[0].returncode:
            raise SystemExit(
                f"{checkout}: {place}: the first host ended with {hosts[0].returncode}"
            )
        figures: dict[str, float] = json.loads(output.splitlines()[-1])
        return figures


# --- a host ---


class _Requests:
    """The counts of the proxy before an emulated store; all zero without one."""

    def __init__(self) -> None:
        self._port = os.environ.get("STATES_STORE_PORT")

    def _ask(self, method: str) -> bytes:
        import http.client

        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", int(self._port or 0))
        ) as connection:
            connection.request(method, "/__log__")
            return connection.getresponse().read()

    def forget(self) -> None:
        if self._port:
            self._ask("DELETE")

    def counts(self) -> tuple[int, int]:
        """Returns the requests since `forget`, and the bytes that they wrote."""
        log = json.loads(self._ask("GET")) if self._port else []
        return len(log), sum(size for _, method, _, size, _ in log if method in ("PUT", "POST"))


def host(place: str, run_dir: str, folder: Path, megabytes: int) -> None:
    """Measures as one of the hosts; the first one prints the figures as JSON."""
    import jax
    import numpy as np
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from maxbatch.parallel.hosts import gather, is_first, join
    from maxbatch.plan.place import Place
    from maxbatch.run.folder.position import Position
    from maxbatch.run.folder.run_id import RunIdentity
    from maxbatch.run.weights.checkpoints import Checkpoints
    from maxbatch.run.weights.local_checkpoints import LocalCheckpoints
    from maxbatch.system.storage.storage import as_path
    from maxbatch.update.state import TrainState

    join(60, host_wait_s=60)
    num_hosts = jax.process_count()
    rows = (
        megabytes * (1 << 20) // (4 * 3 * _NUM_ARRAYS * _LAYERS * _COLUMNS) // num_hosts * num_hosts
    )
    shape = (_LAYERS, rows, _COLUMNS)
    mesh = jax.make_mesh((num_hosts,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split, other = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P(None, None, "fsdp"))
    random = np.random.default_rng(jax.process_index())

    def part(index: Any) -> np.ndarray:
        return random.standard_normal(
            [len(range(*one.indices(size))) for one, size in zip(index, shape, strict=True)],
            np.float32,
        )

    def tree(leaf: Any) -> nnx.State:
        return nnx.from_flat_state(
            [(("layers", f"w{i}"), nnx.Param(leaf())) for i in range(_NUM_ARRAYS)]
        )

    def state_of(leaf: Any) -> TrainState:
        return TrainState(tree(leaf), {"mu": tree(leaf), "nu": tree(leaf)})

    state = state_of(lambda: jax.make_array_from_callback(shape, split, part))
    abstract, turned = (
        state_of(lambda place=place: jax.ShapeDtypeStruct(shape, np.float32, sharding=place))
        for place in (split, other)
    )
    requests, figures = _Requests(), dict[str, float]()
    there = as_path(run_dir)
    if is_first():
        there.mkdir(exist_ok=True)
        line = {
            "tokens_seen": 1,
            "global_batch_size": 1,
            "stage": 0,
            "loss": 1.0,
            "learning_rate": 0.1,
        }
        lines = [json.dumps({"step": step, "samples_seen": step, **line}) for step in (1, 2)]
        (there / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    gather(None)

    def checkpoints() -> Checkpoints:
        return Checkpoints(there, 1, {"data": {}, "model": {}}, print, run_id="run")

    def local() -> LocalCheckpoints:
        return LocalCheckpoints(
            str(folder / "local"), there, RunIdentity("run", False, ""), checkpoints(), print
        )

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        gather(None)
        requests.forget() if is_first() else None
        gather(None)
        started, cpu = time.perf_counter(), time.process_time()
        yield
        used = time.process_time() - cpu
        figures[f"{name}_s"], figures[f"{name}_cpu_s"] = (
            max(gather(time.perf_counter() - started)),
            sum(gather(used)),
        )

    for step in (1, 2):
        saved = local() if place == "local" else checkpoints()
        before = _peak()
        with timed("save"):
            started = time.perf_counter()
            if isinstance(saved, LocalCheckpoints):
                saved.save(state, Position(step, Place(step)), line=None)
            else:
                saved.save(state, Position(step, Place(step)))
            figures["save_blocks_s"] = max(gather(time.perf_counter() - started))
            saved.settle() if place == "local" else saved.close()
        if place == "local":
            saved.close()
    figures["save_requests"], written = requests.counts()
    figures["peak_megabytes"] = max(gather(_peak() - before))
    stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    figures["megabytes"] = (written or stored) / 2**20
    for name, wanted in (("restore", abstract), ("restore_turned", turned)):
        with timed(name):
            if place == "local":
                found = local()
                restored = found.restore(found.states[0], wanted, _make)
            else:
                restored = checkpoints().restore(wanted)
            jax.block_until_ready(restored.state)
        figures.setdefault("restore_requests", requests.counts()[0])
        assert restored.position.step == 2
        del restored
    if not os.environ.get("STATES_STORE_PORT"):
        figures.pop("save_requests")
        figures.pop("restore_requests")
    if is_first():
        print(json.dumps(figures), flush=True)
    gather(None)


def _make(name: str, lower: Any) -> Any:
    return lower().compile()


def _peak() -> float:
    """Returns the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--host"]:
        host(sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
        os._exit(0)  # JAX's own shutdown would wait for the others
    sys.exit(main())
