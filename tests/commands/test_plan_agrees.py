"""Plan and train agree: `train` accepts every config that `plan` accepts, and settings after
`works:` work.
"""

from __future__ import annotations

import argparse
import random
import shlex

import pytest

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.cli import main
from maxbatch.commands import plan as plan_command
from maxbatch.config.config import Config
from maxbatch.config.rules import check_vocabulary
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.tokenizers.tokenizers import make_tokenizer
from maxbatch.model.attention import choose_implementation
from maxbatch.plan.batch import check_batch_keys, expansion_factor
from maxbatch.plan.learning_rate import LearningRate

VALUES = {
    "per_device_batch_size": ["0.5", "1/3", "2", "3", "16", "null"],
    "gradient_accumulation_steps": ["1", "2", "3", "null"],
    "global_batch_size": ["24", "30", "64", "131072", "null"],
    "batch_size_schedule": ["0:8 100:16", "0:7 10:9", "null"],
    "enable_rampup_batch_size": ["true", "false"],
    "per_device_batch_size_start": ["1", "2", "4"],
    "per_device_batch_size_increment": ["1", "2", "5"],
    "expansion_factor_real_data": ["-1", "2", "0.5", "3"],
    "num_pipeline_microbatches": ["-1", "2", "4", "6"],
    "ici_tensor_parallelism": ["1", "2", "4", "-1"],
    "ici_pipeline_parallelism": ["1", "2", "4"],
    "ici_context_parallelism": ["1", "2"],
    "ici_data_parallelism": ["1", "2", "-1"],
    "dcn_data_parallelism": ["1", "2"],
    "num_pipeline_repeats": ["1", "2"],
    "base_num_decoder_layers": ["4", "6"],
    "base_num_query_heads": ["4", "8", "6"],
    "max_target_length": ["256", "100", "255"],
    "head_dim": ["32", "36"],
    "attention": ["auto", "splash", "cudnn", "dot_product"],
    "dtype": ["float32", "bfloat16"],
    "vocab_size": ["264", "100"],
    "tokenizer_path": ["", "tok"],
    "dataset_type": ["python_stdlib", "synthetic", "text", "jsonl"],
    "dataset_path": ["", "a.jsonl", "a,0.5;b,0.5", "a,0.5;b"],
    "eval_per_device_batch_size": ["null", "0", "3", "0.5"],
    "num_epochs": ["2", "null"],
    "train_samples": ["100", "null"],
    "steps": ["10", "null"],
    "batch_size": ["null", "8", "6"],
    "num_generations": ["8", "4"],
    "micro_batch_size": ["-1", "8"],
    "learning_rate_schedule": ["cosine", "constant"],
    "load_parameters_path": ["", "runs/a"],
    "use_sft": ["false", "true"],
    "packing_strategy": ["concatenate", "best_fit"],
    "packing": ["true", "false"],
}


def checks_of_train(config: Config, devices: int, hosts: int) -> None:
    """What `train` (`rl` for a batch of prompts) asks of a config and its devices before it opens a
    file.
    """
    if config.batch_size is None:
        check_batch_keys(config.plan)
    expansion_factor(config.plan, hosts)
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    read_mixture(config.stream)
    if config.dataset_type not in ("synthetic", "tokens"):
        check_vocabulary(config, tokenizer.vocab_size)
    plan = BatchPlan.from_config(config, devices, hosts, samples_per_epoch=1000)
    platform = {"splash": "tpu", "cudnn": "gpu"}.get(config.attention, "cpu")
    choose_implementation(config.decoder, platform, plan.mesh.sizes["context"])
    LearningRate.from_config(config, plan.manager)


def accepted(stated: dict[str, str], devices: int, hosts: int) -> tuple[bool, str]:
    """Returns whether `maxbatch plan` accepts overrides, and its message if not."""
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    words = [f"{name}={text}" for name, text in stated.items()]
    line = [
        *words,
        "--devices",
        str(devices),
        "--hosts",
        str(hosts),
        "--samples-per-epoch",
        "1000",
        "--json",
    ]
    try:
        plan_command.run(parser.parse_args(line))
    except ConfigError as error:
        return False, str(error)
    return True, ""


def follow(stated: dict[str, str], devices: int, hosts: int) -> None:
    """Follows every `works:` to its end, and asks the checks of train then."""
    said: list[str] = []
    for _ in range(12):
        is_accepted, message = accepted(stated, devices, hosts)
        if is_accepted:
            words = [f"{name}={text}" for name, text in stated.items()]
            checks_of_train(load_config(overrides=words), devices, hosts)
            return
        assert message not in said, f"a circle: {message}"
        said.append(message)
        _, separator, works = message.partition("; works: ")
        assert separator, f"names nothing that works: {message}"
        first = works.partition(", or ")[0].partition(" and a dataset")[0]
        for word in shlex.split(first):
            name, equals, text = word.partition("=")
            if name == "--hosts" or (not equals and not name.isidentifier()):
                return
            stated = (
                stated | {name: text} if equals else {k: v for k, v in stated.items() if k != name}
            )
    pytest.fail("\n".join(said))


def mutate(seed: int) -> tuple[dict[str, str], int, int]:
    draw = random.Random(seed)
    names = draw.sample(sorted(VALUES), draw.randint(1, 5))
    devices = draw.choice([1, 2, 4, 8, 16])
    return (
        {name: draw.choice(VALUES[name]) for name in names},
        devices,
        draw.choice([1, 2, devices]) if devices > 1 else 1,
    )


@pytest.mark.parametrize("part", range(5))
def test_what_plan_accepts_train_accepts(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(part * 60, part * 60 + 60):
        follow(*mutate(seed))
        capsys.readouterr()


@pytest.mark.runs
@pytest.mark.parametrize("part", range(4))
def test_what_plan_accepts_of_2000_configs_train_accepts(
    part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(1000 + part * 500, 1500 + part * 500):
        follow(*mutate(seed))
        capsys.readouterr()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tokenizer_path=tok", "the byte tokenizer reads no file"),
        ("vocab_size=100", "the byte tokenizer has 259 tokens"),
        ("attention=cudnn", "must have dtype=bfloat16"),
    ],
)
def test_plan_and_train_say_the_same(
    capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    lines = []
    for command in ("plan", "train"):
        devices = ["--devices", "8"] if command == "plan" else []  # as many as tests have
        assert main([command, override, "run_dir=none", "steps=1", *devices]) == 2
        lines.append(capsys.readouterr().err.splitlines()[-1])
    assert said in lines[0]
    if "cudnn" not in override:  # a CPU refuses that kernel before its shapes
        assert lines[0] == lines[1]
