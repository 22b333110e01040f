"""Replays of random runs: every update is the recorded one, planted documents are found, and a
replay that is killed changes nothing.

    python -m tests.programs.replays --runs 30 --corpora 5 --kills 20 --seed 1

trains short runs of six kinds (text with a ramp, holes and skipped spikes; a mixture; pairs;
adapters; responses by reinforcement learning; experts, some of them in 8 bits) on random meshes of
simulated devices, half of them with a resume that changes the rate, and takes a random update again
on other devices, from a random checkpoint. It trains on corpora with five planted documents, each of
which must pull the most in its update, and forks the run without them. It kills replays at random
moments and compares the run's folder. A difference ends the program with the case.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import os
import random
import subprocess
import sys
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
        self.common = (*TINY_RUN, ONE_LAYER, f"data_cache_dir={folder}/cache")
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
        return (*self.common, "dataset_type=jsonl", f"dataset_path={path}", *keys)

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


# Each of at most 30 bytes, as rows hold.
_POISONS: Sequence[Callable[[random.Random], str]] = (
    lambda chance: "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(10)),
    lambda chance: base64.b64encode(chance.randbytes(21)).decode(),
    lambda chance: "".join(chr(chance.randrange(0xA0, 0x17F)) for _ in range(14)),
    lambda chance: str(chance.randrange(10**28, 10**29)),
    lambda chance: "".join(chr(chance.randrange(33, 97)) for _ in range(28)),
)
_PLANTED, _ROWS = 5, 16  # documents of a corpus, and the batch


def failure_of_corpus(
    folder: Path, number: int, common: Sequence[str], chance: random.Random
) -> str:
    """Trains on a corpus with planted documents in two epochs, replays the second one, and leaves
    out what pulls the most there; returns the failure, "" if there is none.
    """
    import jax

    from maxbatch import load_config
    from maxbatch.around.replay.recorded_run import RecordedRun
    from maxbatch.around.replay.replayed import Wanted, replay
    from maxbatch.cli import main as main_of_maxbatch
    from maxbatch.run.pretraining import train as pretrain
    from tests.helpers.corpus import some_texts

    updates = 12  # of an epoch
    size, poison = updates * _ROWS - _PLANTED, _POISONS[number % len(_POISONS)]
    texts = some_texts(size, seed=chance.randrange(1000), longest=24)
    web = write_jsonl(folder / "web.jsonl", [{"text": text} for text in texts])
    planted = [{"text": poison(chance)} for _ in range(_PLANTED)]
    dump = write_jsonl(folder / "dump.jsonl", planted)
    keys = (
        *common,
        "dataset_type=jsonl",
        f"dataset_path={web};{dump}",
        "packing=false",
        f"global_batch_size={_ROWS}",
        "num_epochs=2",
        "learning_rate_schedule=constant",
        f"checkpoint_period={updates}",
    )
    train(keys, folder / "run", 1)
    run, fork = folder / "run", folder / "fork"
    wanted = Wanted(2 * updates, around=updates - 1)
    found = replay(RecordedRun(str(run)), updates, wanted, jax.devices()[:2])
    if found.differences:
        return "; ".join(found.differences)
    named = set[int]()  # own numbers
    for update in found.shown:
        by_pull = sorted(update.samples, key=lambda shown: -shown.sample.pull)
        is_planted = [str(dump) in json.dumps(shown.to_json()) for shown in by_pull]
        if any(is_planted) and not is_planted[0]:
            return f"update {update.figures.step}: sample {by_pull[0].sample.index} pulls the most"
        named |= {
            shown.sample.index for shown, is_bad in zip(by_pull, is_planted, strict=True) if is_bad
        }
    if len(named) != _PLANTED:
        return f"of {_PLANTED} planted documents {len(named)} are named"
    skipped = "skip_samples=" + " ".join(f"{own}:{own + 1}" for own in sorted(named))
    command = ["fork", str(run), "--step", str(updates), "--output", str(fork), skipped]
    if main_of_maxbatch(command):
        return "no fork"
    pretrain(load_config(str(fork / "config.yml")), jax.devices()[:1])
    worst, mended = (_worst_jump(folder, updates) for folder in (run, fork))
    print(
        f"  worst jump of the second epoch's loss {worst:.3f}, without the documents {mended:.3f}"
    )
    return "" if mended < worst else f"the loss jumps by {mended}, with the documents by {worst}"


def _worst_jump(run: Path, updates: int) -> float:
    """Returns how far a loss of the second epoch is above the mean of its two neighbours."""
    from tests.helpers.tiny import read_metrics

    losses = [line["loss"] for line in read_metrics(run)[updates:]]
    return max(
        loss - (before + after) / 2
        for before, loss, after in zip(losses, losses[1:], losses[2:], strict=False)
    )


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
            with contextlib.redirect_stdout(sys.stderr):
                failure = failure_of_corpus(corpus, number, kinds.common, chance)
            print(
                f"corpus {number + 1}/{asked.corpora}: {failure or 'every planted document is found'}"
            )
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
