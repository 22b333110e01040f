"""`prepare` and `sweep` on a Ray cluster of two nodes, one of which is killed: they leave what one
machine leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maxbatch.around.sweep.folder import SweepFolder
from maxbatch.cli import main
from maxbatch.commands import prepare
from maxbatch.run.folder.outcome import Status
from maxbatch.system.processes.ray_cluster import shared_variables
from maxbatch.system.storage.locks import take_lock
from maxbatch.system.storage.storage import as_path
from tests.helpers.command import environment, maxbatch, recorded, start_anew
from tests.helpers.processes import wait_for
from tests.helpers.stores import Store
from tests.helpers.sweeps import write_sweep
from tests.helpers.tiny import read_metrics

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Ray starts its processes by a fork; where other modules of tests have started JAX, JAX warns
    # of it.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]
_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
KillNode = Callable[[], None]


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Starts processes as a shell starts those in the background."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'maxbatch[ray]')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
        # the trials' are those of a command on one machine
        patch.setenv("XLA_FLAGS", environment()["XLA_FLAGS"])
        from ray.cluster_utils import Cluster

        with interrupts_ignored(), patch.context() as of_nodes:
            # a node knows nothing of the command's bucket
            for name in shared_variables(os.environ):
                of_nodes.delenv(name)
            made = Cluster(
                initialize_head=True, head_node_args=_NODE | {"include_dashboard": False}
            )
        yield made
        made.shutdown()


@pytest.fixture
def kill_node(cluster: Any) -> KillNode:
    """Makes the cluster have a second node; returns a function that kills it and its processes."""
    with interrupts_ignored():
        node = cluster.add_node(**_NODE)
    return lambda: cluster.remove_node(node, allow_graceful=False)


def test_prepare_gives_the_same_bytes_when_a_node_is_killed(
    cluster: Any,
    kill_node: KillNode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open("web.jsonl", "w") as file:
        for number in range(200_000):
            file.write(
                json.dumps({"text": f"document {number} " + "words of it " * (number % 40)}) + "\n"
            )
    data = ["dataset_type=jsonl", "dataset_path=web.jsonl", "eval_fraction=0.01"]
    assert main(["prepare", *data, "--workers", "1", "--output", "one"]) == 0
    left = [kill_node]

    @contextlib.contextmanager
    def progress_of_a_cluster(size: int, title: str) -> Iterator[Callable[[int], None]]:
        yield lambda num_bytes: left.pop()() if left else None

    monkeypatch.setattr(prepare, "bytes_bar", progress_of_a_cluster)
    assert main(["prepare", *data, "--ray", cluster.address, "--output", "two"]) == 0, (
        capsys.readouterr().err
    )
    assert not left, "the node was killed"
    files = sorted(path.name for path in Path("one").iterdir())
    assert files == sorted(path.name for path in Path("two").iterdir())
    assert all(
        (Path("one") / name).read_bytes() == (Path("two") / name).read_bytes() for name in files
    )


def test_prepare_and_sweep_use_a_bucket_that_is_known_to_the_command_alone(
    cluster: Any, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = store.bucket()
    lines = (
        json.dumps({"text": f"document {n} " + "words of it " * (n % 40)}) + "\n"
        for n in range(20_000)
    )
    as_path(f"{bucket}/web.jsonl").write_bytes("".join(lines).encode())
    data = ["prepare", "dataset_type=jsonl", f"dataset_path={bucket}/web.jsonl"]
    for output, *flags in (("one", "--workers", "1"), ("two", "--ray", cluster.address)):
        assert main([*data, "--output", f"{bucket}/{output}", *flags]) == 0, capsys.readouterr().err
    one, two = (
        {path.name: path.read_bytes() for path, _ in as_path(f"{bucket}/{output}").files()}
        for output in ("one", "two")
    )
    assert one == two and len(one) >= 3

    if store.scheme == "s3":  # which asks for credentials
        sweep = write_sweep({"learning_rate": ["1e-3"]}, sweep_dir=f"{bucket}/sw")
        assert main(["sweep", sweep, "--ray", cluster.address]) == 0, capsys.readouterr()
        [result] = SweepFolder(as_path(f"{bucket}/sw")).results("loss")
        assert (result.status, result.steps) == (Status.DONE, 4)


def test_the_first_bad_record_is_named_as_on_one_machine(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": "words of it " * 40}) for _ in range(30_000)]
    Path("web.jsonl").write_text(
        "\n".join([*lines[:20_000], '{"text": 7}', *lines[20_000:], "no record"])
    )
    data = ["prepare", "dataset_type=jsonl", "dataset_path=web.jsonl", "--output", "tokens"]
    errors = []
    for flags in (["--workers", "1"], ["--ray", cluster.address]):
        assert main([*data, *flags]) == 2
        errors.append(capsys.readouterr().err)
    assert "20001" in errors[0] and errors[0] == errors[1] and not Path("tokens").exists()


def test_a_sweep_whose_node_and_command_are_killed_trains_every_trial_once(
    cluster: Any, kill_node: KillNode
) -> None:
    base = {"steps": 200, "checkpoint_period": 20}
    rates: dict[str, Any] = {"learning_rate": ["1e-3", "3e-3", "1e-2", "3e-2"]}
    command = ["sweep", write_sweep(rates, base, parallel=2), "--ray", cluster.address]
    folder = SweepFolder(Path("sw"))

    def running(at_least: int) -> bool:
        begun = [
            trial.folder
            for trial in folder.trials()
            if not trial.is_finished and recorded(trial.folder)
        ]
        return len(begun) >= at_least

    def ended(at_least: int) -> bool:
        return sum(trial.is_finished for trial in folder.trials()) >= at_least

    def num_starts() -> int:
        logs = [trial.folder / "log.txt" for trial in folder.trials()]
        return sum(log.read_text().count("samples per update") for log in logs if log.exists())

    first = start_anew(*command)
    wait_for(lambda: running(2), first)
    kill_node()
    wait_for(lambda: ended(1) and running(1), first)
    first.kill()
    first.communicate()
    assert not ended(3)
    for trial in folder.trials():
        lock = take_lock(trial.folder / ".claim", 30)
        assert lock is not None, "the training of a trial goes with the command that is killed"
        lock.close()

    starts = num_starts()
    second = start_anew(*command)
    wait_for(lambda: num_starts() > starts, second)
    second.send_signal(signal.SIGTERM)
    output, _ = second.communicate(timeout=600)
    assert (
        second.returncode == 75 and "of 4 trials are left. The same command continues." in output
    ), output

    third = maxbatch(*command)
    assert third.returncode == 0, third.stdout + third.stderr
    trials = folder.trials()
    assert len(trials) == 4 and 4 < num_starts() <= 4 + 1 + 1 + 2 + 2, (
        "a lost node and two stops interrupt trials"
    )
    for trial in trials:
        assert [record["step"] for record in read_metrics(trial.folder)] == list(range(1, 201))

    alone = maxbatch("sweep", write_sweep(rates, base, parallel=2, sweep_dir="one"))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    there, here = folder.results("loss"), SweepFolder(Path("one")).results("loss")
    for ours, theirs in zip(there, here, strict=True):
        assert (
            ours.trial.overrides == theirs.trial.overrides
            and ours[1:3] == theirs[1:3]
            and ours[4:] == theirs[4:]
        )
        assert ours.value == pytest.approx(theirs.value, rel=1e-5)


def test_what_a_cluster_cannot_do_is_one_line(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, said in (
        (["--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1: no Ray cluster answers"),
        (["--ray", "nonsense"], "--ray nonsense: no Ray cluster answers (Invalid address format"),
    ):
        assert main(["sweep", write_sweep({"learning_rate": ["1e-3"]}), *flags]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_an_address_that_never_answers_is_refused_within_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'maxbatch[ray]')")
    Path("web.jsonl").write_text('{"text": "one"}')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        data = ["prepare", "dataset_type=jsonl", "dataset_path=web.jsonl", "--output", "tokens"]
        assert main([*data, "--ray", address]) == 2
    assert f"--ray {address}: no Ray cluster answers (timed out)" in capsys.readouterr().err
