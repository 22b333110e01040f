"""Replays of random runs: every update is the recorded one, planted documents are found, and a
replay that is killed changes nothing.

    python -m tests.programs.replays --runs 30 --corpora 5 --kills 20 --seed 1

trains short runs of six kinds (text with a ramp, holes and skipped spikes; a mixture; pairs;
adapters; responses by reinforcement learning; experts, some of them in 8 bits) on random meshes of
simulated devices, half of them with a resume that changes the rate, and takes a random update again
on other devices, from a random checkpoint. It trains on corpora with planted documents, replays
every spike, and forks the run with what the replays print until no spike is left. It kills replays
at random moments and compares the run's folder. A difference ends the program with the case.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import math
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxbatch.system.hardware.cpu_devices import make_cpu_devices
from tests.helpers.command import QUICK_TO_COMPILE, environment

_DEVICES = 8
_IN_EIGHT_BITS = 2e-3  # of a loss, over the updates of a run
_SPARSE = (
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=32",
    "load_balance_loss_weight=0.1",
)
_GOOD = 250  # characters of a good document
_MOST_FORKS = 3  # of a run with planted documents


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Returns the bytes and the time of every file in a folder."""
    return {
        str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def write_jsonl(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Kinds:
    """The keys of each kind of run, drawn anew for every run.

    Args:
      folder: has the data, and the model of adapters.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        from tests.helpers.corpus import some_texts
        from tests.helpers.tiny import ONE_LAYER, TINY_RUN

        self._folder, self._chance = folder, chance
        self._common = (*TINY_RUN, ONE_LAYER, f"data_cache_dir={folder}/cache")
        texts = [{"text": text} for text in some_texts(200)]
        self._texts = write_jsonl(folder / "texts.jsonl", texts)
        others = [{"text": text} for text in some_texts(80, seed=1)]
        self._others = write_jsonl(folder / "others.jsonl", others)
        pairs = [
            {"prompt": f"{n}?", "chosen": " yes" * (1 + n % 3), "rejected": " no" * (1 + n % 4)}
            for n in range(60)
        ]
        self._pairs = write_jsonl(folder / "pairs.jsonl", pairs)
        self.by_name: Mapping[str, Callable[[], tuple[str, ...]]] = {
            "text": self._of_text,
            "mixture": self._of_mixture,
            "pairs": self._of_pairs,
            "adapters": self._of_adapters,
            "rl": self._of_rl,
            "experts": self._of_experts,
        }

    def _jsonl(self, path: object, *keys: str) -> tuple[str, ...]:
        return (*self._common, "dataset_type=jsonl", f"dataset_path={path}", *keys)

    def _of_text(self) -> tuple[str, ...]:
        first = self._chance.randrange(40)
        keys = (
            "batch_size_schedule=0:4 12:8",
            "per_device_batch_size=2",
            f"skip_samples={first}:{first + self._chance.randint(1, 9)}",
            "skip_step_on_spikes=true",
            "skip_step_interval=4",
            f"skip_step_scaling_factor={self._chance.choice((0.1, 1, 6))}",
        )
        return self._jsonl(self._texts, *keys)

    def _of_mixture(self) -> tuple[str, ...]:
        share = self._chance.choice((0.2, 0.5, 0.9))
        mixture = f"{self._texts},{share};{self._others},{1 - share:.1f}"
        return self._jsonl(mixture, "global_batch_size=8")

    def _of_pairs(self) -> tuple[str, ...]:
        algorithm = self._chance.choice(("dpo", "orpo"))
        keys = ("use_dpo=true", f"dpo_algo={algorithm}", "packing=false", "global_batch_size=8")
        return self._jsonl(self._pairs, *keys)

    def _of_adapters(self) -> tuple[str, ...]:
        base = self._folder / "base"
        if not base.exists():
            train(self._jsonl(self._others, "global_batch_size=8", "steps=1"), base, 1)
        adapters = ("lora_rank=2", f"load_parameters_path={base}", "global_batch_size=8")
        return self._jsonl(self._texts, *adapters)

    def _of_experts(self) -> tuple[str, ...]:
        quantization = self._chance.choice(("", "int8"))
        keys = (*_SPARSE, f"quantization={quantization}", "global_batch_size=8")
        return self._jsonl(self._texts, *keys)

    def _of_rl(self) -> tuple[str, ...]:
        from tests.helpers.policies import KEYS, reward_file

        chance = self._chance
        return (
            *KEYS,
            reward_file(self._folder),
            "learning_rate_schedule=constant",
            f"batch_size={chance.choice((4, 8))}",
            f"num_minibatches={chance.choice((1, 2))}",
            f"num_iterations={chance.choice((1, 2))}",
            f"off_policy_steps={chance.choice((0, 0, 1, 2))}",
            f"filter_groups={chance.choice(('true', 'false'))}",
            f"grpo_beta={chance.choice((0, 0.04))}",
            f"transcript_period={chance.choice((-1, 1, 2))}",
            "max_prompts_per_batch=24",
            "batch_padding=true",
        )


def train(keys: Sequence[str], run_dir: Path, num_devices: int) -> None:
    """Trains a run, or goes on with it."""
    import jax

    from maxbatch import load_config
    from maxbatch.kinds.prompt.run import train_policy
    from maxbatch.run.pretraining import train as pretrain
    from tests.helpers.policies import RL

    is_rl = any(key.startswith("batch_size=") for key in keys)
    config = load_config(RL if is_rl else None, [*keys, f"run_dir={run_dir}"])
    (train_policy if is_rl else pretrain)(config, jax.devices()[:num_devices])


def failure_of_replay(name: str, keys: tuple[str, ...], run: Path, chance: random.Random) -> str:
    """Trains a run, and takes one of its updates again; returns the differences, "" if none."""
    import jax

    from maxbatch.around.replay.recorded_run import RecordedRun
    from maxbatch.around.replay.replayed import Wanted, replay

    updates = math.prod(
        int(key.partition("=")[2])
        for key in keys
        if key.startswith(("num_minibatches=", "num_iterations="))
    )
    num_devices = chance.choice((1, 2, 4, 8))
    axis = chance.choice(("ici_fsdp_parallelism=-1", "ici_tensor_parallelism=2"))
    if num_devices > 1 and name != "adapters":
        keys = (*keys, axis)
    period = f"checkpoint_period={2 * updates}"
    train((*keys, period, f"steps={4 * updates}"), run, num_devices)
    if chance.random() < 0.5:
        more = (period, f"steps={6 * updates}", "learning_rate=2e-3")
        train((*keys, *more), run, num_devices)
    recorded = RecordedRun(str(run))
    step = chance.randint(1, max(recorded.lines))
    before = recorded.checkpoint_before(step, None)
    checkpoint = chance.choice((before, None))
    wanted = Wanted(step, around=chance.choice((0, 1)) if step > 1 else 0)
    if checkpoint is not None and step - wanted.around <= checkpoint:
        wanted = Wanted(step)
    devices = chance.choice([number for number in (1, 2, 3, 4, 8) if number != num_devices])
    if "ici_pipeline_parallelism=2" in keys or name == "pairs":
        devices = min(devices, 4)
    was = content(run)
    found = replay(recorded, checkpoint, wanted, jax.devices()[:devices])
    print(f"  update {step} of {num_devices} devices, from {found.start} on {devices}")
    if content(run) != was:
        return "the run's folder has changed"
    if found.differences:
        return "; ".join(found.differences)
    figures = found.update.figures
    samples = [shown.sample for shown in found.update.samples]
    numbers = (figures.loss, figures.recorded_loss, *(sample.share for sample in samples))
    if not samples or any(number is None for number in numbers):
        return ""
    assert figures.loss is not None and figures.recorded_loss is not None, "they are numbers"
    if abs(figures.loss - figures.recorded_loss) > _IN_EIGHT_BITS:
        return f"loss {figures.loss}, recorded {figures.recorded_loss}"
    total = sum(sample.share or 0.0 for sample in samples)
    mean = sum((sample.loss or 0.0) * sample.weight for sample in samples)
    mean /= sum(sample.weight for sample in samples)
    if abs(total - 1) > 1e-2 or abs(mean - figures.loss) > _IN_EIGHT_BITS:
        return f"shares sum to {total}, losses of samples make {mean}, not {figures.loss}"
    return ""


_POISONS: Sequence[Callable[[random.Random], str]] = (
    lambda chance: "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(84)),
    lambda chance: base64.b64encode(chance.randbytes(186)).decode(),
    lambda chance: "".join(chr(chance.randrange(0xA0, 0x17F)) for _ in range(125)),
    lambda chance: " ".join(str(chance.randrange(10**9)) for _ in range(25)),
    lambda chance: "".join(chr(chance.randrange(0x1F300, 0x1F64F)) for _ in range(62)),
)


def failure_of_corpus(folder: Path, number: int, size: int, chance: random.Random) -> str:
    """Trains on a corpus with five planted documents, in two epochs, and leaves out what replays of
    its spikes name until no spike is left; returns the failure, "" if there is none.
    """
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(errors="ignore")[:4000] for path in chance.sample(library, 40)]
    good = [text[i : i + _GOOD] for text in texts for i in range(0, len(text), _GOOD)]
    web = write_jsonl(folder / "web.jsonl", [{"text": t} for t in chance.sample(good, size)])
    poison = _POISONS[number % len(_POISONS)]
    dump = write_jsonl(folder / "dump.jsonl", [{"text": poison(chance)} for _ in range(5)])
    keys = (
        "dataset_type=jsonl",
        f"dataset_path={web};{dump}",
        f"data_cache_dir={folder}/cache",
        "max_target_length=256",
        "packing=false",
        "global_batch_size=4",
        "num_epochs=2",
        "learning_rate=3e-3",
        "checkpoint_period=10",
        "max_num_checkpoints_to_keep=null",
        "skip_step_on_spikes=true",
        "skip_step_interval=32",
        f"run_dir={folder}/run-0",
        "generate_prompt=",
    )
    _command("train", *keys)
    found = 0
    for fork in range(1, _MOST_FORKS + 1):
        run = folder / f"run-{fork - 1}"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        spikes = [line["step"] for line in lines if line["skip_reason"] == "spike"]
        print(f"  {run.name}: spikes {spikes}")
        if not spikes:
            break
        ranges = list[str]()
        for spike in spikes:
            replayed = json.loads(_command("replay", run, "--step", spike, "--top", 1, "--json"))
            (document,) = {place["file"] for place in replayed["samples"][0]["documents"]}
            if document != str(dump):
                return f"{run}: the sample that pulls the most of update {spike} is of {document}"
            ranges += replayed["skip_samples"].split()
            found += 1
        steps = [int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()]
        step = max(step for step in steps if step < spikes[0])
        target = folder / f"run-{fork}"
        skipped = f"skip_samples={' '.join(dict.fromkeys(ranges))}"
        _command("fork", run, "--step", step, "--output", target, skipped)
        _command("train", target / "config.yml")
    else:
        return f"{run} still has spikes"
    return "" if found else "no planted document made a spike"


def _command(*arguments: object) -> str:
    """Runs a command in this process; returns what it printed."""
    from maxbatch.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([str(argument) for argument in arguments])
    assert code == 0, f"{arguments}: exit code {code}"
    return printed.getvalue()


def failure_of_kills(run: Path, step: int, kills: int, chance: random.Random) -> str:
    """Kills replays of a run at random moments; returns what has changed in its folder, "" if
    nothing.
    """
    was, longest = content(run), 0.0
    for number in range(kills + 1):
        started = time.monotonic()
        replay = subprocess.Popen(
            [sys.executable, "-m", "maxbatch", "replay", str(run), "--step", str(step), "--json"],
            env=environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if number == 0:  # the first one tells how long they take
            _, said = replay.communicate()
            longest = time.monotonic() - started
            if replay.returncode:
                return f"a replay ended with {replay.returncode}: {said}"
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                replay.wait(chance.uniform(0, longest))
            replay.kill()
            replay.communicate()
        if changed := [name for name, file in content(run).items() if was.get(name) != file]:
            return f"a killed replay has changed {changed}"
        if was.keys() != content(run).keys():
            return "a killed replay has removed files"
    return ""


def _run_of_text(kinds: Kinds, run: Path) -> None:
    keys: tuple[Any, ...] = (*kinds.by_name["text"](), "checkpoint_period=2", "steps=4")
    train(keys, run, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Replays random runs; returns 0 if nothing differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.replays",
        description=" ".join(__doc__.partition("\n\n")[0].split()),
    )
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--corpora", type=int, default=0)
    parser.add_argument("--size", type=int, default=400, help="good documents of a corpus")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE
    make_cpu_devices(_DEVICES)
    chance, begun = random.Random(asked.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="maxbatch-replays-") as name:
        folder = Path(name)
        kinds = Kinds(folder, chance)
        for number in range(asked.runs):
            kind = list(kinds.by_name)[number % len(kinds.by_name)]
            keys = kinds.by_name[kind]()
            with contextlib.redirect_stdout(sys.stderr):
                failure = failure_of_replay(kind, keys, folder / f"run-{number}", chance)
            print(f"{number + 1}/{asked.runs} {kind}: {failure or 'as recorded'}")
            if failure:
                print(" ".join(keys), file=sys.stderr)
                return 1
        for number in range(asked.corpora):
            corpus = folder / f"corpus-{number}"
            corpus.mkdir()
            failure = failure_of_corpus(corpus, number, asked.size, chance)
            print(f"corpus {number + 1}/{asked.corpora}: {failure or 'no spike is left'}")
            if failure:
                return 1
        if asked.kills:
            run = folder / "killed"
            _run_of_text(kinds, run)
            failure = failure_of_kills(run, 4, asked.kills, chance)
            print(f"{asked.kills} kills: {failure or 'nothing has changed'}")
            if failure:
                return 1
    print(f"seed {asked.seed}: all as recorded; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
