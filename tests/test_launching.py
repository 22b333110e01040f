"""The files of launch/: checks without a cluster, and SLURM's script with a stand-in for SLURM."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxbatch.around.sweep.study import check_combinations
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.cli import make_parser
from maxbatch.system.processes.ports import free_port
from tests.helpers.command import Hold, environment, maxbatch, recorded
from tests.helpers.processes import wait_for
from tests.helpers.tiny import ONE_LAYER, TINY_RUN, read_metrics

TOP = Path(__file__).resolve().parent.parent
LAUNCH = TOP / "launch"
SURVIVING = "jobset_survive.yml"  # a script starts it again
JOBSETS = sorted(path.name for path in LAUNCH.glob("jobset*.yml"))
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def with_commands(folder: Path, **more: str) -> dict[str, str]:
    return environment() | {"PATH": f"{folder}:{os.environ['PATH']}"} | more


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("file", [file for file in JOBSETS if file != SURVIVING])
def test_the_jobset_restarts_a_run_that_was_stopped_and_counts_only_failures(file: str) -> None:
    jobset = yaml.safe_load((LAUNCH / file).read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] >= 1
    assert policy["rules"] == [
        {"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    (slices,) = jobset["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    stopped, taken_away = job["podFailurePolicy"]["rules"]
    assert stopped["action"] == taken_away["action"] == "FailJob"
    assert stopped["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [75],
    }
    assert taken_away["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # a run starts again with all its hosts
    assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("file", JOBSETS)
def test_the_jobset_asks_for_the_chips_that_its_topology_has(file: str) -> None:
    (slices,) = yaml.safe_load((LAUNCH / file).read_text())["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert job["parallelism"] * container["resources"]["limits"]["google.com/tpu"] == chips
    assert job["completions"] == job["parallelism"]
    over_slices = -1 if file == SURVIVING else slices["replicas"]
    assert slices["replicas"] == 1 or f"dcn_data_parallelism={over_slices}" in container["args"]
    (run_dir,) = [a.removeprefix("run_dir=") for a in container["args"] if a.startswith("run_dir=")]
    assert run_dir.startswith("gs://") and container["args"][0] == "train"
    assert "volumes" not in pod and "volumeMounts" not in container, "a bucket needs no mount"


def test_the_jobset_of_v5p_is_the_slice_of_the_tutorial() -> None:
    page = (TOP / "docs" / "tutorials" / "from-maxtext.md").read_text()
    text = (LAUNCH / "jobset_v5p.yml").read_text()
    assert (
        "--topology v5p:4x4x4" in page
        and "gke-tpu-topology: 4x4x4" in text
        and "tpu-v5p-slice" in text
    )
    assert "16 hosts" in page and "parallelism: 16" in text


def test_the_container_holds_what_the_package_needs_and_passes_signals_on() -> None:
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == {"pyproject.toml", "README.md", "configs", "maxbatch"}
    assert all((TOP / name).exists() for name in copied)
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"tpu", "cuda", "text", "parquet", "gcs", "s3"} <= extras.keys()
    assert 'ENTRYPOINT ["maxbatch"]' in lines  # no shell between the signals and the process


# Each call writes its arguments down and ends with the next of the codes.
MAXBATCH = """#!/bin/bash
printf '%s|' "$@" >> "$CALLS"; echo >> "$CALLS"
read -r code rest <<< "$(cat "$CODES")"
echo "$rest" > "$CODES"
exit "$code"
"""


@pytest.fixture
def stub(tmp_path: Path) -> Any:
    """Runs a command with a `maxbatch` that ends with the given codes; returns its result and all
    calls.
    """

    def run(command: list[str], codes: str, **variables: str) -> tuple[int, list[str]]:
        executable(tmp_path / "bin" / "maxbatch", MAXBATCH)
        (tmp_path / "codes").write_text(codes)
        (tmp_path / "calls").write_text("")
        paths = {"CALLS": str(tmp_path / "calls"), "CODES": str(tmp_path / "codes")}
        done = subprocess.run(
            command, env=with_commands(tmp_path / "bin", **paths, **variables), timeout=60
        )
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return run


SCONTROL = '#!/bin/bash\necho "scontrol $*|" >> "$CALLS"\n'
# Starts the tasks of a step on this machine, hands SIGTERM on, and ends with the highest of their
# codes.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[1:], env=os.environ | {{
        "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_STEP_NODELIST": "localhost"}})
    for i in range(int(os.environ["SLURM_NTASKS"]))
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (2, False), (1, False)])
def test_slurm_requeues_a_run_that_saved_and_stopped_and_no_other(
    tmp_path: Path, stub: Any, code: int, requeued: bool
) -> None:
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "scontrol", SCONTROL)
    job = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "4711"}
    ended, calls = stub([str(LAUNCH / "slurm.sh"), "my run.yml", "steps=3"], str(code), **job)
    assert ended == code
    assert calls[0] == "train|my run.yml|steps=3|"
    assert calls[1:] == (["scontrol requeue 4711|"] if requeued else [])


@pytest.mark.parametrize(
    ("codes", "runs", "ended"), [("0", 1, 0), ("75 75 0", 3, 0), ("75 2", 2, 2)]
)
def test_tpu_workers_go_on_after_a_stop_and_end_with_the_run(
    tmp_path: Path, stub: Any, codes: str, runs: int, ended: int
) -> None:
    gcloud = (
        '#!/bin/bash\necho "$1 $2 $3 $4 $5 $6 $7|" >> "$CALLS"\nexec bash -c "${8#--command=}"\n'
    )
    executable(tmp_path / "bin" / "gcloud", gcloud)
    # A login shell would put its own folders first.
    executable(
        tmp_path / "bin" / "bash",
        '#!/bin/sh\n[ "$1" = -lc ] && shift && set -- -c "$@"\nexec /bin/bash "$@"\n',
    )
    command = [
        str(LAUNCH / "tpu_vm.sh"),
        "my-tpu",
        "us-east5-a",
        "my run.yml",
        "generate_prompt=it's $5",
    ]
    code, calls = stub(command, codes)
    assert code == ended
    assert calls[0] == "compute tpus tpu-vm ssh my-tpu --zone=us-east5-a --worker=all|"
    assert calls[1:] == ["train|my run.yml|generate_prompt=it's $5|"] * runs


def test_a_tpu_worker_without_maxbatch_installs_it_with_a_python_that_is_new_enough(
    tmp_path: Path,
) -> None:
    calls, home = tmp_path / "calls", tmp_path / "home"
    executable(tmp_path / "bin" / "gcloud", '#!/bin/bash\nexec bash -c "${8#--command=}"\n')
    executable(
        tmp_path / "bin" / "bash",
        '#!/bin/sh\n[ "$1" = -lc ] && shift && set -- -c "$@"\nexec /bin/bash "$@"\n',
    )
    executable(tmp_path / "maxbatch", '#!/bin/bash\necho "maxbatch $*" >> "$CALLS"\n')
    uv = '#!/bin/bash\necho "uv $*" >> "$CALLS"\nmkdir -p "$HOME/.maxbatch/bin"\n'
    executable(tmp_path / "bin" / "uv", f'{uv}cp {tmp_path}/maxbatch "$HOME/.maxbatch/bin/"\n')
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(home), "CALLS": str(calls)}
    done = subprocess.run(
        [LAUNCH / "tpu_vm.sh", "my-tpu", "zone", "steps=3"], env=environment, timeout=60
    )
    assert done.returncode == 0
    venv, install, run = calls.read_text().splitlines()
    assert venv == f"uv venv --quiet --python 3.12 {home}/.maxbatch"
    assert install.endswith(f"{home}/.maxbatch/bin/python {home}/maxbatch[tpu,gcs,s3,text,parquet]")
    assert run == "maxbatch train steps=3"


def test_tpu_vm_says_what_it_needs() -> None:
    done = subprocess.run([LAUNCH / "tpu_vm.sh", "my-tpu"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


def free_job_id() -> str:
    """A job whose port, as JAX derives it from the job's number, is free here."""
    for job in range(4096):
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", job + 61440))
            except OSError:
                continue
            return str(job)
    raise AssertionError("no port is free")


@pytest.mark.processes
def test_a_slurm_job_that_is_preempted_is_requeued_and_goes_on(tmp_path: Path) -> None:
    """Two tasks that find each other by SLURM's variables; SIGTERM to the script; the same job
    again.
    """
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "scontrol", SCONTROL)
    executable(
        tmp_path / "bin" / "maxbatch", f'#!/bin/sh\nexec {sys.executable} -m maxbatch "$@"\n'
    )
    calls, run_dir = tmp_path / "calls", tmp_path / "run"
    calls.touch()
    hold = Hold(3, tmp_path)

    def start_job() -> subprocess.Popen[str]:
        job = free_job_id()
        variables = {"CALLS": str(calls), "SLURM_NTASKS": "2", "SLURM_JOB_ID": job} | hold.variables
        return subprocess.Popen(
            [
                LAUNCH / "slurm.sh",
                *TINY_RUN,
                ONE_LAYER,
                f"run_dir={run_dir}",
                "steps=30",
                "per_device_batch_size=2",
            ],
            env=with_commands(tmp_path / "bin", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            output, _ = job.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
        return job.returncode, output

    job = start_job()
    wait_for(lambda: recorded(run_dir) >= 3, job)
    job.send_signal(signal.SIGTERM)
    time.sleep(3)  # from the script to the tasks, also where they have few cores
    hold.release()
    code, output = finish(job)
    assert code == 75, output
    assert re.fullmatch(r"scontrol requeue \d+\|\n", calls.read_text())
    stopped_after = len(read_metrics(run_dir))
    assert 3 <= stopped_after < 30

    code, output = finish(start_job())
    assert code == 0, output
    assert calls.read_text().count("requeue") == 1
    assert [m["step"] for m in read_metrics(run_dir)] == [m + 1 for m in range(30)]
    assert all(m["global_batch_size"] == 4 for m in read_metrics(run_dir)), (
        "two processes, two rows each"
    )


# A SLURM of the nodes n0 to n2, all on this machine: those in $DEAD start nothing. It notes the pid
# of each task.
NODES_SCONTROL = (
    '#!/bin/bash\n[ "$1" = show ] && printf "n%s\\n" 0 1 2 || echo "scontrol $*" >> "$CALLS"\n'
)
NODES_SRUN = f"""#!{sys.executable}
import os, pathlib, subprocess, sys
flags = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(flags):]
[nodes] = [flag.split("=")[1].split(",") for flag in flags if flag.startswith("--nodelist=")]
dead = pathlib.Path(os.environ["DEAD"])
if set(nodes) & set(dead.read_text().split()):
    sys.exit(1)
if command == ["true"]:
    sys.exit(0)
with open(os.environ["CALLS"], "a") as calls:
    print("srun", *nodes, file=calls)
tasks = [
    subprocess.Popen(command, env=os.environ | {{
        "SLURM_NTASKS": str(len(nodes)), "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i),
        "SLURM_STEP_NODELIST": "localhost"}})
    for i in range(len(nodes))
]
(dead.parent / "pids").write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(abs(task.wait()) for task in tasks))
"""


SURVIVOR = (
    *TINY_RUN,
    ONE_LAYER,
    "steps=12",
    "global_batch_size=12",
    "per_device_batch_size=2",
    "checkpoint_period=3",
    "heartbeat_timeout_s=10",
    "compilation_cache_dir=none",
)


@pytest.fixture(scope="module")
def surviving_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of three hosts, and of two."""
    folder = tmp_path_factory.mktemp("survive") / "compiled"
    done = maxbatch(
        "compile", *SURVIVOR, "--simulate-hosts", "3", "--survive", "1", "--output", str(folder)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_without_the_second(
    command: list[str], folder: Path, run_dir: Path, name: str, **variables: str
) -> None:
    """Runs a script until it ends by itself; after seven updates its second host is lost with its
    node or pool.
    """
    executable(folder / "bin" / "maxbatch", f'#!/bin/sh\nexec {sys.executable} -m maxbatch "$@"\n')
    (folder / "dead").touch()
    hold = Hold(7, folder)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            env=with_commands(folder / "bin", **variables, **hold.variables),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(lambda: recorded(run_dir) >= 7 or process.poll() is not None)
        os.kill(int((folder / "pids").read_text().split()[1]), signal.SIGKILL)
        (folder / "dead").write_text(name)
        hold.release()
        code = process.wait(300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log").read_text()
    # Nobody can tell: every update is there once, of one batch, and no start compiled a program.
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {line["global_batch_size"] for line in lines} == {12}
    assert {line["compiles"] for line in lines} == {0}, "the programs of compile --survive"


@pytest.mark.processes
def test_a_slurm_job_that_loses_a_node_goes_on_with_the_two_that_are_left(
    tmp_path: Path, surviving_programs: Path
) -> None:
    executable(tmp_path / "bin" / "srun", NODES_SRUN)
    executable(tmp_path / "bin" / "scontrol", NODES_SCONTROL)
    run_dir, calls = tmp_path / "run", tmp_path / "calls"
    job = {
        "CALLS": str(calls),
        "DEAD": str(tmp_path / "dead"),
        "SLURM_JOB_ID": free_job_id(),
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "n[0-2]",
        "SLURM_NTASKS_PER_NODE": "1",
    }
    script = [
        str(LAUNCH / "slurm_survive.sh"),
        *SURVIVOR,
        f"run_dir={run_dir}",
        f"compiled_dir={surviving_programs}",
    ]
    run_without_the_second(script, tmp_path, run_dir, "n1", **job)
    assert calls.read_text().splitlines() == ["srun n0 n1 n2", "srun n0 n2"]


# A cluster of one-host node pools on this machine. It has one JobSet, whose hosts are processes of
# `kubectl create`.
KUBECTL = f"""#!{sys.executable}
import json, os, pathlib, re, subprocess, sys, yaml
top, words = pathlib.Path(os.environ["CLUSTER"]), sys.argv[1:]
jobset, codes = top / "jobset.json", top / "codes"

def field(value, path):
    for name, index in re.findall(r"\\.((?:[^.\\[\\\\]|\\\\.)+)(?:\\[(\\d+)\\])?", path):
        value = value[name.replace("\\\\.", ".")]
        value = value[int(index)] if index else value
    return value

if "--dry-run=client" in words:
    stated = yaml.safe_load(open(words[words.index("-f") + 1]))
    print(field(stated, words[-1].removeprefix("jsonpath={{").removesuffix("}}")))
elif words[:2] == ["get", "nodes"]:
    assert words[3] == "cloud.google.com/gke-tpu-accelerator=tpu-v5-lite-podslice,cloud.google.com/gke-tpu-topology=4x4"
    dead = (top / "dead").read_text().split()
    for pool in os.environ["POOLS"].split():
        print(pool, "Unknown" if pool in dead else "True", "")
elif words[0] == "create":
    stated = yaml.safe_load(sys.stdin)
    (slices,) = stated["spec"]["replicatedJobs"]
    (container,) = slices["template"]["spec"]["template"]["spec"]["containers"]
    jobset.write_text(json.dumps(stated))
    with open(top / "calls", "a") as calls:
        print("create", slices["replicas"], file=calls)
    if not os.fork():
        hosts = [
            subprocess.Popen(["maxbatch", *container["args"]], env=os.environ | {{
                "JAX_NUM_PROCESSES": str(slices["replicas"]), "JAX_PROCESS_ID": str(i),
                "JAX_COORDINATOR_ADDRESS": os.environ["ADDRESS"], "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}})
            for i in range(slices["replicas"])
        ]
        (top / "pids").write_text(" ".join(str(host.pid) for host in hosts))
        codes.write_text(" ".join(str(host.wait()) for host in hosts))
elif words[:2] == ["get", "jobset"]:
    ended = codes.read_text().split() if codes.exists() else None
    state = "" if ended is None else "Completed" if set(ended) == {{"0"}} else "Failed"
    print(json.loads(jobset.read_text())["metadata"]["name"], state, end="")
elif words[:2] == ["get", "pods"]:
    print(codes.read_text())
elif words[:2] == ["delete", "jobset"]:
    codes.unlink(missing_ok=True)
    (top / "stopped").touch()
else:
    sys.exit(f"kubectl {{words}}")
"""


def surviving_jobset(folder: Path, args: list[str], num_slices: int) -> Path:
    """Writes the JobSet of the repository with slices of one host, other arguments and as many
    slices.
    """
    jobset = yaml.safe_load((LAUNCH / SURVIVING).read_text())
    [slices] = jobset["spec"]["replicatedJobs"]
    slices["replicas"], job = num_slices, slices["template"]["spec"]
    job["parallelism"] = job["completions"] = 1
    job["template"]["spec"]["containers"][0]["args"] = args
    file = folder / "jobset.yml"
    file.write_text(yaml.safe_dump(jobset))
    return file


@pytest.mark.processes
def test_a_jobset_that_loses_a_slice_goes_on_with_the_two_that_are_left(
    tmp_path: Path, surviving_programs: Path
) -> None:
    executable(tmp_path / "bin" / "kubectl", KUBECTL)
    run_dir = tmp_path / "run"
    args = ["train", *SURVIVOR, f"run_dir={run_dir}", f"compiled_dir={surviving_programs}"]
    script = [str(LAUNCH / "jobset_survive.sh"), str(surviving_jobset(tmp_path, args, 3))]
    cluster = {
        "CLUSTER": str(tmp_path),
        "POOLS": "p0 p1 p2",
        "ADDRESS": f"localhost:{free_port()}",
        "POLL_S": "0.5",
    }
    run_without_the_second(script, tmp_path, run_dir, "p1", **cluster)
    assert (tmp_path / "calls").read_text().splitlines() == ["create 3", "create 2"]


# A host ends with the code of its start: the third one of the first start is lost with its slice.
HOST = """#!/bin/bash
echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES: $*" >> "$CLUSTER/hosts"
[ "$JAX_NUM_PROCESSES" -eq 4 ] || exit 0
[ "$JAX_PROCESS_ID" -eq 2 ] || exit "$CODE"
echo p2 > "$CLUSTER/dead"
kill -9 $$
"""


@pytest.mark.parametrize(
    ("code", "fewest", "starts", "ended"),
    [(75, "3", [4, 3], 0), (1, "3", [4, 3], 0), (2, "3", [4], 2), (75, "4", [4], None)],
)
def test_a_jobset_is_started_again_on_the_slices_that_are_ready(
    tmp_path: Path, code: int, fewest: str, starts: list[int], ended: int | None
) -> None:
    """Stopped or failed, it starts again; not after invalid input, nor on too few slices, for which
    it waits.
    """
    executable(tmp_path / "bin" / "kubectl", KUBECTL)
    executable(tmp_path / "bin" / "maxbatch", HOST)
    (tmp_path / "dead").touch()
    script = [
        str(LAUNCH / "jobset_survive.sh"),
        str(surviving_jobset(tmp_path, ["train", "my.yml"], 4)),
    ]
    cluster = {
        "CLUSTER": str(tmp_path),
        "POOLS": "p0 p1 p2 p3",
        "ADDRESS": "",
        "POLL_S": "0.1",
        "CODE": str(code),
        "FEWEST_SLICES": fewest,
    }
    process = subprocess.Popen(script, env=with_commands(tmp_path / "bin", **cluster))
    if ended is None:
        wait_for(lambda: (tmp_path / "stopped").exists())
        process.terminate()
        ended = 75
    assert process.wait(100) == ended
    assert (tmp_path / "calls").read_text().splitlines() == [f"create {count}" for count in starts]
    assert len((tmp_path / "hosts").read_text().splitlines()) == sum(starts)


def test_the_script_of_a_jobset_names_its_file() -> None:
    done = subprocess.run([LAUNCH / "jobset_survive.sh"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


def test_the_ray_job_runs_a_sweep_with_a_trial_on_every_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # nobody waits for credentials of its bucket
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:9")
    settings, job = yaml.safe_load_all((LAUNCH / "ray_gke.yml").read_text())
    entrypoint = shlex.split(job["spec"]["entrypoint"])
    args = make_parser("sweep").parse_args(entrypoint[2:])
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    assert (args.ray, args.resources) == (
        "auto",
        {"TPU": worker["resources"]["limits"]["google.com/tpu"]},
    )
    Path("lr.yml").write_text(settings["data"][Path(args.file).name])
    sweep = SweepFile.read("lr.yml")
    check_combinations(sweep)
    assert sweep.parallel == group["replicas"] and str(sweep.sweep_dir).startswith("gs://")


def test_the_page_names_every_file_and_its_commands_name_files_that_exist() -> None:
    page = (TOP / "docs" / "launching.md").read_text()
    for file in LAUNCH.iterdir():
        assert f"launch/{file.name}" in page, file
    for named in re.findall(r"launch/[\w.]+", page):
        assert (TOP / named).is_file(), named
