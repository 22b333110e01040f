"""Random commands of other programs that split a replica: `import` keeps their batch and their mesh.

    python -m tests.programs.replicas --cases 2000 --seed 1

writes configs of every imported program with random sizes of its replica (tensor, context,
pipeline), its experts and its batch, and compares the plan of the imported config with the batch
that the other program computes: rows of a micro-batch x replicas x passes, or the stated batch. A
plan may refuse only with a `works:`, which must keep the batch and every key that it does not
name; half of the models have too few heads or layers for some axes. A case that differs
ends the search.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from maxbatch import BatchPlan, load_config
from maxbatch.around.importers.translation import UNSUPPORTED
from maxbatch.commands.import_config import translated, written
from maxbatch.config.config import Config
from maxbatch.system.errors import ConfigError

_ROW, _STEPS = 512, 10  # tokens, updates
# a model that every axis divides, and that of the imported config, with few heads and layers
_MODELS = (("base_num_query_heads=16", "base_num_kv_heads=8", "base_num_decoder_layers=16"), ())


class Sizes(NamedTuple):
    """A replica, its copies and its rows, as random cases state them."""

    tensor: int
    context: int
    pipeline: int
    expert: int
    replicas: int
    micro: int  # rows of a replica in one pass
    passes: int

    @property
    def devices(self) -> int:
        return self.tensor * self.context * self.pipeline * self.replicas

    @property
    def batch(self) -> int:
        return self.micro * self.replicas * self.passes


class Case(NamedTuple):
    """A file of another program, with the batch and the axes that its import must have."""

    program: str
    name: str
    text: str
    devices: int
    batch: int
    axes: Mapping[str, int]
    model: tuple[str, ...] = ()


def _sizes(rng: random.Random) -> Sizes:
    tensor, context, pipeline = (rng.choice((1, 1, 2, 4)) for _ in range(3))
    replicas = rng.choice((1, 2, 3, 4, 8))
    experts = rng.choice([size for size in (1, 1, 2, 4) if replicas % size == 0])
    return Sizes(tensor, context, pipeline, experts, replicas, rng.randint(1, 6), rng.randint(1, 6))


def _axes(size: Sizes, *names: str) -> dict[str, int]:
    return {f"ici_{name}_parallelism": getattr(size, name) for name in names}


_REPLICA = ("tensor", "context", "pipeline")


def _shuffled(rng: random.Random, words: Mapping[str, object]) -> dict[str, object]:
    """Returns stated words in random order; a size of 1 is often left out."""
    items = [(word, value) for word, value in words.items() if value != 1 or rng.random() < 0.3]
    rng.shuffle(items)
    return dict(items)


def _flags(words: Mapping[str, object]) -> str:
    stated = (
        f"--{word.replace('_', '-')}" + ("" if value is True else f" {value}")
        for word, value in words.items()
    )
    return " ".join(stated)


def _megatron_words(rng: random.Random, size: Sizes) -> tuple[dict[str, object], int]:
    """Returns words and the batch; without a global batch an update is one pass."""
    is_stated = rng.random() < 0.6
    words: dict[str, object] = {
        "tensor_model_parallel_size": size.tensor,
        "context_parallel_size": size.context,
        "pipeline_model_parallel_size": size.pipeline,
    }
    if size.expert > 1:
        words |= {"expert_model_parallel_size": size.expert, "num_experts": 4}
    if is_stated:
        words["global_batch_size"] = size.batch
    return words, size.batch if is_stated else size.micro * size.replicas


def _megatron(rng: random.Random) -> Case:
    size = _sizes(rng)
    words, batch = _megatron_words(rng, size)
    if size.tensor > 1 and rng.random() < 0.5:
        words["sequence_parallel"] = True
    fixed = {"micro_batch_size": size.micro, "train_iters": _STEPS, "seq_length": _ROW, "lr": 1e-4}
    shape = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8}
    text = f"torchrun pretrain_gpt.py {_flags(fixed | _shuffled(rng, words | shape))}\n"
    axes = _axes(size, *_REPLICA, "expert")
    return Case("megatron", "m.sh", text, size.devices, batch, axes)


def _nemo(rng: random.Random) -> Case:
    size = _sizes(rng)
    words, _ = _megatron_words(rng, size)
    words |= {"micro_batch_size": size.micro, "global_batch_size": size.batch}
    if "num_experts" in words:
        words["num_moe_experts"] = words.pop("num_experts")
    stated = [f"model.{word}={value}" for word, value in words.items()]
    rng.shuffle(stated)
    text = f"python megatron_gpt_pretraining.py trainer.max_steps={_STEPS} {' '.join(stated)}\n"
    axes = _axes(size, *_REPLICA, "expert")
    return Case("nemo", "n.sh", text, size.devices, size.batch, axes)


def _deepspeed(rng: random.Random) -> Case:
    size = _sizes(rng)
    batch = {
        "train_batch_size": size.batch,
        "train_micro_batch_size_per_gpu": size.micro,
        "gradient_accumulation_steps": size.passes,
    }
    # two state the third; the micro-batch and the passes alone too
    left_out = rng.choice(["", "train_batch_size", "gradient_accumulation_steps"])
    batch.pop(left_out, None)
    words: dict[str, object] = dict(batch)
    if size.tensor > 1:
        words["tensor_parallel"] = {"autotp_size": size.tensor}
    if size.context > 1:
        words["sequence_parallel_size"] = size.context
    if size.pipeline > 1:
        words["pipeline"] = {"stages": size.pipeline}
    text = json.dumps(_shuffled(rng, words) | batch)
    return Case("deepspeed", "d.json", text, size.devices, size.batch, _axes(size, *_REPLICA))


def _axolotl(rng: random.Random) -> Case:
    size = _sizes(rng)._replace(pipeline=1)
    context = rng.choice(("context_parallel_size", "sequence_parallel_degree"))
    words: dict[str, object] = {
        "tensor_parallel_size": size.tensor,
        context: size.context,
        "dp_shard_size": size.replicas if rng.random() < 0.5 else 1,
    }
    fixed = {
        "base_model": "models/small",
        "datasets": [{"path": "a.jsonl", "type": "completion"}],
        "sequence_len": _ROW,
        "max_steps": _STEPS,
        "micro_batch_size": size.micro,
        "gradient_accumulation_steps": size.passes,
    }
    text = yaml.safe_dump(_shuffled(rng, words) | fixed, sort_keys=rng.random() < 0.5)
    axes = _axes(size, "tensor", "context")
    return Case("axolotl", "a.yml", text, size.devices, size.batch, axes)


def _hf(rng: random.Random) -> Case:
    size = _sizes(rng)._replace(pipeline=1)
    context = rng.choice(("cp_size", "sp_size"))
    splits = _shuffled(rng, {"tp_size": size.tensor, context: size.context})
    batch = {
        "per_device_train_batch_size": size.micro,
        "gradient_accumulation_steps": size.passes,
        "max_steps": _STEPS,
    }
    axes = _axes(size, "tensor", "context")
    if rng.random() < 0.5:
        flags = _flags({f"parallelism_config_{word}": value for word, value in splits.items()})
        text = f"accelerate launch {flags} train.py {_flags(batch)}\n"
        return Case("hf", "h.sh", text, size.devices, size.batch, axes)
    text = json.dumps(batch | ({"parallelism_config": splits} if splits else {}))
    return Case("hf", "h.json", text, size.devices, size.batch, axes)


def _llamafactory(rng: random.Random) -> Case:
    size = _sizes(rng)
    words = {
        "tensor_model_parallel_size": size.tensor,
        "context_parallel_size": size.context,
        "pipeline_model_parallel_size": size.pipeline,
    }
    fixed = {
        "stage": "pt",
        "finetuning_type": "full",
        "model_name_or_path": "models/small",
        "dataset": "a",
        "cutoff_len": _ROW,
        "max_steps": _STEPS,
        "per_device_train_batch_size": size.micro,
        "gradient_accumulation_steps": size.passes,
    }
    text = yaml.safe_dump(fixed | _shuffled(rng, words), sort_keys=rng.random() < 0.5)
    return Case("llamafactory", "f.yml", text, size.devices, size.batch, _axes(size, *_REPLICA))


def _llamafactory_v1(rng: random.Random) -> Case:
    size = _sizes(rng)._replace(tensor=1, pipeline=1)
    is_stated = rng.random() < 0.6
    words = {"cp_size": size.context, "dp_size": size.replicas if rng.random() < 0.3 else 1}
    fixed = {
        "model": "models/small",
        "train_dataset": "a.yaml",
        "cutoff_len": _ROW,
        "max_steps": _STEPS,
        "micro_batch_size": size.micro,
        **({"global_batch_size": size.batch} if is_stated else {}),
    }
    text = yaml.safe_dump(fixed | _shuffled(rng, words), sort_keys=rng.random() < 0.5)
    batch = size.batch if is_stated else size.micro * size.replicas
    axes = _axes(size, "context")
    return Case("llamafactory", "f.yml", text, size.devices, batch, axes)


def _torchtitan(rng: random.Random) -> Case:
    size = _sizes(rng)
    is_stated = rng.random() < 0.5
    splits = {
        "tensor_parallel_degree": size.tensor,
        "context_parallel_degree": size.context,
        "pipeline_parallel_degree": size.pipeline,
        "data_parallel_shard_degree": rng.choice((-1, size.replicas)),
    }
    training = {
        "local_batch_size": size.micro,
        "seq_len": _ROW,
        "steps": _STEPS,
        **({"global_batch_size": size.batch} if is_stated else {}),
    }
    batch = size.batch if is_stated else size.micro * size.replicas
    flags = {f"training.{word}": value for word, value in training.items()}
    flags |= {f"parallelism.{word}": v for word, v in _shuffled(rng, splits).items()}
    if rng.random() < 0.5:
        text = " ".join(f"--{word} {value}" for word, value in flags.items())
        text = f"torchrun -m torchtitan.train {text}\n"
        return Case("torchtitan", "t.sh", text, size.devices, batch, _axes(size, *_REPLICA))
    text = "\n".join(f"{word} = {value}" for word, value in flags.items())
    return Case("torchtitan", "t.toml", text, size.devices, batch, _axes(size, *_REPLICA))


_PROGRAMS: tuple[Callable[[random.Random], Case], ...] = (
    _megatron,
    _nemo,
    _deepspeed,
    _axolotl,
    _hf,
    _llamafactory,
    _llamafactory_v1,
    _torchtitan,
)


# keys that a `works:` may change: of the mesh, and of the split of a batch
_CHANGED = {
    *(f"ici_{axis}_parallelism" for axis in (*_REPLICA, "fsdp", "data", "expert")),
    *("per_device_batch_size", "gradient_accumulation_steps", "global_batch_size"),
    *("batch_padding", "num_pipeline_microbatches", "num_pipeline_repeats"),
}
_WITH_A_MODEL = ("megatron", "nemo")


def random_case(rng: random.Random) -> Case:
    case = rng.choice(_PROGRAMS)(rng)
    if case.program in _WITH_A_MODEL:
        return case
    return case._replace(model=rng.choice(_MODELS))


def fault(case: Case, folder: Path) -> str:
    """Returns how an import differs from the program that it imports, or ""."""
    path = folder / case.name
    path.write_text(case.text)
    translation, _ = translated(case.program, path)
    refused = [fate.word for fate in translation.fates if fate.fate == UNSUPPORTED]
    if refused:
        return f"not supported: {', '.join(refused)}"
    run = folder / "imported.yml"
    try:
        run.write_text(written(translation, path.name))
    except ConfigError as error:
        return f"refused: {error}"
    stated = list(case.model)
    try:
        return _difference(case, _planned(run, stated, case.devices), "")
    except ConfigError as error:
        works = str(error).partition("works: ")[2]
        if not works:
            return f"refused without works: {error}"
        is_of_batch = str(error).startswith("global_batch_size")
    if is_of_batch:  # the batch itself is refused; the rule names padding, which keeps it
        works = "batch_padding=true"
    try:
        return _difference(case, _planned(run, [*stated, *shlex.split(works)], case.devices), works)
    except ConfigError as second:
        return f"works: {works} does not: {second}"


def _planned(run: Path, stated: list[str], devices: int) -> tuple[Config, BatchPlan]:
    config = load_config(run, overrides=stated)
    return config, BatchPlan.from_config(config, devices)


def _difference(case: Case, planned: tuple[Config, BatchPlan], works: str) -> str:
    config, plan = planned
    by = f" (with {works})" if works else ""
    if plan.global_batch_size_to_train_on != case.batch:
        return f"{plan.global_batch_size_to_train_on} samples, not {case.batch}{by}"
    if others := {text.partition("=")[0] for text in shlex.split(works)} - _CHANGED:
        return f"works: changes {', '.join(sorted(others))}{by}"
    for axis, size in case.axes.items():
        if config[axis] != size and axis not in works:
            return f"{axis}={config[axis]}, not {size}{by}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="go on after a difference")
    args = parser.parse_args()
    rng, faults = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.cases):
            case = random_case(rng)
            if found := fault(case, Path(folder)):
                print(f"case {number}, {case.program}, {case.devices} devices: {found}")
                print(case.text)
                faults += 1
                if not args.all:
                    break
    print(f"{args.cases} cases of seed {args.seed}: {faults or 'no'} differences")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
