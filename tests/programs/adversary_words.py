"""Damaged configs of every format and odd command lines, for a fuzzer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

_WORDS = {
    "maxtext": (
        "per_device_batch_size",
        "steps",
        "dataset_type",
        "model_name",
        "run_name",
        "enable_rampup_batch_size",
        "base_config",
        "remat_policy",
        "num_pipeline_repeats",
        "ici_pipeline_parallelism",
        "profiler",
        "profiler_steps",
        "global_parameter_scale",
        "attention",
        "grain_train_files",
        "batch_size",
    ),
    "hf": (
        "per_device_train_batch_size",
        "max_steps",
        "num_train_epochs",
        "warmup_steps",
        "lr_scheduler_type",
        "seed",
        "learning_rate",
        "optim",
        "save_steps",
        "eval_steps",
        "eval_strategy",
        "logging_steps",
    ),
    "deepspeed": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.type",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
        "bf16.enabled",
        "zero_optimization.stage",
    ),
    "axolotl": (
        "micro_batch_size",
        "batch_size",
        "num_epochs",
        "datasets",
        "sequence_len",
        "base_model",
        "val_set_size",
        "warmup_ratio",
        "lr_scheduler",
        "cosine_min_lr_ratio",
    ),
    "megatron": (
        "micro_batch_size",
        "global_batch_size",
        "rampup_batch_size",
        "train_iters",
        "train_samples",
        "lr",
        "min_lr",
        "lr_decay_style",
        "tensor_model_parallel_size",
        "split",
        "data_path",
        "hidden_size",
        "num_attention_heads",
        "step_batch_size_schedule",
        "lr_warmup_samples",
        "trainer.max_steps",
        "model.optim.name",
        "kv_channels",
        "swiglu",
        "betas",
    ),
}
_OURS = (
    "steps",
    "per_device_batch_size",
    "batch_size_schedule",
    "run_dir",
    "dataset_path",
    "learning_rate",
    "dtype",
    "base_config",
    "model_name",
    "ici_fsdp_parallelism",
    "train_tokens",
    "num_epochs",
    "log_to",
    "remat_policy",
    "max_target_length",
    "vocab_size",
    "base_emb_dim",
    "global_batch_size",
    "enable_rampup_batch_size",
)
_VALUES = (
    "4",
    "8",
    "-1",
    "0",
    "1e999",
    "nan",
    "-.inf",
    "1e-400",
    "9" * 400,
    "²",
    "٣",
    "3/0",
    "1/3",
    "10:13",
    "0x10",
    "true",
    "null",
    "~",
    "",
    "[]",
    "{}",
    "[1, 2]",
    "[[1], [2]]",
    "[{a: 1}]",
    "{a: {b: 1}}",
    "auto",
    "a;b",
    "a,0.5;b,0.5",
    '"\\e[2J\\n"',
    '"\\0"',
    '"\\ud800"',
    "!!binary NA==",
    "!x y",
    "*a",
    "&a 4",
    "<<",
    "{<<: {a: 1}}",
    "4 8 3000",
    "0:4 100:8",
    "0:4 4:1e9",
    "seesaw 256 2",
    "gs://",
    "s3://b",
    "~/x",
    "/dev/zero",
    "..",
    "%s",
    "${A}",
    "$A",
    "'",
    '"',
    "linear",
    "cosine",
    "wsd",
    "adamw",
    "yes",
    "1" * 5_000,
    "a" * 5_000,
    "1e18",
    "9223372036854775807",
    "0.1",
    "1.5",
)
_SUFFIXES = (".yml", ".yaml", ".json", ".sh", ".txt", "")


def damaged_configs(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yields names and contents of configs of ours and of other programs, most of them damaged, for
    ever.
    """
    number = 0
    while True:
        framework = rng.choice((*_WORDS, "ours"))
        form = rng.choice((_as_yaml, _as_json, _as_flags, _as_lines))
        words = [_word(rng, framework) for _ in range(rng.randint(0, 8))]
        content = form(rng, [(word, rng.choice(_VALUES)) for word in words]).encode(
            "utf-8", "surrogatepass"
        )
        for _ in range(rng.choice((0, 0, 1, 3))):
            content = rng.choice(_DAMAGES)(rng, content)
        number += 1
        yield f"{framework}-{number}{rng.choice(_SUFFIXES)}", content


def command_lines(rng: random.Random) -> Iterator[list[str]]:
    """Yields arguments of `plan`, `config` and `import` without a file, for ever."""
    flags = (
        "--json",
        "--layout",
        "--words",
        "--devices",
        "--hosts",
        "--slices",
        "--samples-per-epoch",
        "--help",
    )
    while True:
        line = [rng.choice(("plan", "plan", "config", "import"))]
        for _ in range(rng.randint(0, 5)):
            kind = rng.random()
            if kind < 0.6:
                name = _word(rng, "ours") if kind < 0.5 else _word(rng, rng.choice(tuple(_WORDS)))
                line.append(f"{name}={rng.choice(_VALUES)}")
            else:
                line.append(rng.choice(flags) if kind < 0.8 else rng.choice(_VALUES))
        yield [word.replace("\0", "") for word in line]


def _word(rng: random.Random, framework: str) -> str:
    names = _OURS if framework == "ours" else _WORDS[framework]
    name = rng.choice(names)
    return (
        name
        if rng.random() < 0.9
        else rng.choice((f"x.{name}", name[:-1], name.upper(), "<<", "", "a b", "\x1b[2J"))
    )


def _as_yaml(rng: random.Random, pairs: list[tuple[str, str]]) -> str:
    anchors = "a: &a {x: 1, per_device_batch_size: 2}\n" if rng.random() < 0.3 else ""
    return anchors + "".join(
        f"{json.dumps(name) if ' ' in name else name}: {value}\n" for name, value in pairs
    )


def _as_json(rng: random.Random, pairs: list[tuple[str, str]]) -> str:
    return (
        "{"
        + ", ".join(
            f"{json.dumps(name)}: {rng.choice((value, json.dumps(value)))}" for name, value in pairs
        )
        + "}"
    )


def _as_flags(rng: random.Random, pairs: list[tuple[str, str]]) -> str:
    start = rng.choice(("", "A=4\n", "A=(--x 1)\n", "export A='4 $A'\n")) + rng.choice(
        ("", "torchrun train.py ")
    )
    return start + rng.choice((" ", " \\\n", "; ", " && python train.py ")).join(
        f"--{n} {v}" for n, v in pairs
    )


def _as_lines(rng: random.Random, pairs: list[tuple[str, str]]) -> str:
    start = rng.choice(("", "python train.py base.yml "))
    return start + rng.choice((" ", "\n")).join(f"{name}={value}" for name, value in pairs)


def _with(rng: random.Random, content: bytes, piece: bytes) -> bytes:
    at = rng.randint(0, len(content))
    return content[:at] + piece + content[at:]


_PIECES = (
    b"\0",
    b"\xff",
    b"\r",
    b"\t",
    b"[" * 300,
    b"{" * 300,
    b"- " * 300,
    b'"',
    b"'",
    b"\n---\n",
    b"\\",
    b"$(",
    b"? ",
    b"<<: *a\n",
    b"\xef\xbb\xbf",
    b"%YAML 9.9\n",
    b"!!python/object:os.system ",
    b": ",
    b"\x1b]0;x\x07",
    b"&a *a",
)
_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    lambda rng, content: _with(rng, content, rng.choice(_PIECES)),
    lambda rng, content: content[: rng.randint(0, len(content))],
    lambda rng, content: content * rng.randint(2, 40),
    lambda rng, content: bytes(b ^ (rng.random() < 0.02) << rng.randrange(8) for b in content),
    lambda rng, content: content.decode("utf-8", "replace").encode("utf-16"),
    lambda rng, content: content.replace(b"\n", b"\r\n"),
)
