"""Damaged files of every kind that a command reads, and the commands that read them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.chats import some_talks, write_tokenizer
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.huggingface_folders import write_folder
from tests.helpers.reports import write_run
from tests.programs.adversary_cases import Case, Damage
from tests.programs.adversary_lines import TINY

_RUN = (*TINY, "run_dir=run", "generate_prompt=", "eval_interval=-1", "vocab_size=512")
_TRAINED = (*_RUN, "steps=4", "checkpoint_period=2", "per_device_batch_size=2")
_COMPILED = (*_TRAINED, "compiled_dir=programs")
_CHATS = (
    *_RUN,
    "dataset_type=jsonl",
    "dataset_path=chats.jsonl",
    "use_sft=true",
    "tokenizer_type=huggingface",
    "tokenizer_path=tokenizer",
)
IMPORTS = {
    "maxtext.yml": "base_config: parent.yml\nper_device_batch_size: 2\nsteps: 10\nrun_name: "
    "a\nlearning_rate: 3.e-5\nrl:\n  num_generations: 2\ndcn_mesh: [1, 2]\n",
    "parent.yml": "base_emb_dim: 64\nremat_policy: full\nenable_checkpointing: true\n",
    "maxtext.sh": "export N=4\npython3 -m maxtext.train base.yml per_device_batch_size=$N "
    "steps=${STEPS:-10}\n",
    "hf.json": json.dumps(
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_train_epochs": 2}
    ),
    "deepspeed.json": json.dumps(
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
            "bf16": {"enabled": True},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 100, "total_num_steps": 1000},
            },
        }
    ),
    "axolotl.yml": "base_model: m\ndatasets:\n  - path: a.jsonl\n    type: completion\nsequence_len: "
    "2048\nmicro_batch_size: 3\ngradient_accumulation_steps: 2\nmax_steps: 100\n",
    "megatron.sh": 'ARGS="\n --micro-batch-size 2\n --global-batch-size 96\n"\nARGS+=\' --lr '
    "1e-4'\ntorchrun --nproc_per_node 8 pretrain_gpt.py $ARGS --num-layers 24 --hidden-size "
    "1024 \\\n  --num-attention-heads 16 --seq-length 1024 --rampup-batch-size 16 16 3000 "
    "--train-iters 5000\n",
    "nemo.yml": "trainer: {devices: 8, max_steps: 300}\nmodel:\n  micro_batch_size: 2\n  "
    "global_batch_size: 64\n  rampup_batch_size: [16, 16, 1000]\n  optim: {name: adamw, lr: "
    "2e-4, betas: [0.9, 0.98]}\n",
}
_SWEEP = (
    "sampler: random\ntrials: 3\nmetric: loss\nsweep_dir: sw\nbase:\n  steps: 2\n  "
    "per_device_batch_size: 2\n  base_config: base.yml\nparameters:\n  learning_rate: {low: 1e-4, "
    "high: 1e-2, log: true}\n  global_batch_size: [4, 8]\n"
)
_MIXTURE = (
    "dataset_type: jsonl\nmax_target_length: 32\ndataset_path:\n"
    "  - {path: a.jsonl, weight: 0.7}\n  - {path: b.jsonl, weight: 0.3}\n"
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Files of one kind: their maker, and the commands that read them."""

    make: Callable[[Path], None]
    commands: tuple[tuple[str, ...], ...]
    weight: int
    is_slow: bool = False  # whether to make or to read them starts processes or compiles


def _config(folder: Path) -> None:
    (folder / "run.yml").write_text(
        "base_config: middle.yml\nper_device_batch_size: 4\nlearning_rate: 3e-4\n"
    )
    (folder / "middle.yml").write_text("base_config: base.yml\nbatch_size_schedule: '0:8 100:16'\n")
    (folder / "base.yml").write_text("model_name: tiny\ntrain_samples: 10K\nrun_name: x\n")


def _imports(folder: Path) -> None:
    for name, text in IMPORTS.items():
        (folder / name).write_text(text)


def _sweep(folder: Path) -> None:
    (folder / "sweep.yml").write_text(_SWEEP)
    (folder / "base.yml").write_text("max_target_length: 32\ndataset_type: synthetic\n")


def _data(folder: Path) -> None:
    records = [{"text": text, "id": n} for n, text in enumerate(some_texts(40))]
    for name in ("a", "b"):
        write_jsonl(folder / f"{name}.jsonl", records)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    (folder / "a.txt").write_text("\n".join(some_texts(20)))
    (folder / "mixture.yml").write_text(_MIXTURE)


def _binary_data(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from array_record.python.array_record_module import ArrayRecordWriter

    texts = some_texts(40)
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=10)
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()


def _chats(folder: Path) -> None:
    write_jsonl(folder / "chats.jsonl", some_talks(10))
    write_tokenizer(folder / "tokenizer")


def _store(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in some_texts(40)])
    _maxbatch(folder, "prepare", "dataset_type=jsonl", "dataset_path=a.jsonl", "--output", "tokens")


def _folders(folder: Path) -> None:
    """Makes folders of runs and sweeps that never ran."""
    from maxbatch.around.sweep.folder import SweepFolder
    from maxbatch.run.folder.devices import DevicesUsed, record_devices
    from maxbatch.run.folder.outcome import RecordedOutcome, Status, write_outcome

    _sweep(folder)
    write_run(folder / "run", 8, *TINY, "steps=8")
    record_devices(folder / "run", DevicesUsed(1, "cpu", 2, 1, 1, {"fsdp": 2}))
    write_outcome(folder / "run", RecordedOutcome(Status.DIVERGED, "it did"))
    branch = {"batch_size": 8, "learning_rate": 1e-3, "updates": 8, "loss": 3.0, "difference": 0.0}
    found = {
        "run": "run",
        "tolerance": 0.01,
        "tolerance_unit": "nats",
        "command": "maxbatch train",
        "checkpoints": [
            {
                "step": 4,
                "samples_seen": 64,
                "batch_size": 8,
                "is_below_base": False,
                "critical_batch_size": 8,
                "in_words": "8 it is",
                "branches": [branch, branch | {"batch_size": 16, "loss": 3.1}],
            }
        ],
    }
    (folder / "run" / "critical-batch").mkdir()
    (folder / "run" / "critical-batch" / "critical_batch.json").write_text(json.dumps(found))
    sweep = SweepFolder(folder / "sw")
    for number in range(2):
        write_run(sweep.trial_folder(number), 4)
        trial = sweep.add(
            number, {"learning_rate": str(0.001 * (number + 1)), "global_batch_size": "8"}, {}
        )
        sweep.finish(trial, Status.DONE)
    sweep.write(
        {
            "sampler": "random",
            "metric": "loss",
            "seed": 0,
            "log_keys": ["learning_rate"],
            "parameters": {"learning_rate": ["0.0001", "0.01"], "global_batch_size": ["4", "8"]},
        }
    )


def _trained(folder: Path) -> None:
    _maxbatch(folder, "train", *_TRAINED)
    write_jsonl(folder / "page.jsonl", [{"text": text} for text in some_texts(2)])


def _compiled(folder: Path) -> None:
    _maxbatch(folder, "compile", *_TRAINED, "--output", "programs")


def _huggingface(folder: Path) -> None:
    write_folder(folder / "hf", vocab_size=40)
    write_jsonl(folder / "page.jsonl", [{"tokens": [1, 2, 3, 4]}])
    (folder / "hf" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 3], "temperature": 0.5})
    )


def _maxbatch(folder: Path, *arguments: str) -> None:
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "maxbatch", *arguments],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


_STREAM = ("data", "max_target_length=32", "--count", "2")
_TOKENS = ("dataset_type=tokens", "dataset_path=tokens")
KINDS = {
    "config": Kind(
        _config, (("plan", "run.yml"), ("config", "run.yml"), ("plan", "run.yml", "--json")), 20
    ),
    "import": Kind(
        _imports,
        tuple(
            ("import", form, file, *skip)
            for file in IMPORTS
            if file != "parent.yml"
            for skip in ((), ("--skip-unsupported",))
            for form in ("auto", {"nemo.yml": "nemo"}.get(file, file.split(".")[0]))
        ),
        25,
    ),
    "sweep": Kind(_sweep, (("sweep", "sweep.yml"),), 8),
    "data": Kind(
        _data,
        (
            ("data", "mixture.yml", "--count", "2"),
            (*_STREAM, "dataset_type=jsonl", "dataset_path=a.jsonl"),
            (*_STREAM, "dataset_type=jsonl", "dataset_path=c.jsonl.gz"),
            ("data", "mixture.yml", "--stats", "--json"),
            (*_STREAM, "dataset_type=text", "dataset_path=a.txt"),
            (*_STREAM, "dataset_type=jsonl", "dataset_path=*.jsonl"),
            (
                "prepare",
                "dataset_type=jsonl",
                "dataset_path=a.jsonl",
                "--output",
                "out",
                "--workers",
                "1",
            ),
        ),
        20,
    ),
    "binary data": Kind(
        _binary_data,
        (
            (*_STREAM, "dataset_type=parquet", "dataset_path=a.parquet"),
            (*_STREAM, "dataset_type=arrayrecord", "dataset_path=a.array_record"),
            (
                *_STREAM,
                "dataset_type=arrayrecord",
                "dataset_path=a.array_record",
                "record_format=example",
            ),
        ),
        10,
    ),
    "chats": Kind(
        _chats,
        (("data", *_CHATS, "--count", "1"), ("data", *_CHATS, "--stats"), ("train", *_CHATS)),
        12,
    ),
    "folders": Kind(
        _folders,
        (
            ("report", "run"),
            ("report", "run"),
            ("report", "sw"),
            ("report", "run", "sw"),
            ("plan", "run/config.yml"),
            ("critical-batch", "run"),
            ("sweep", "sweep.yml"),
            ("config", "run/config.yml"),
        ),
        25,
    ),
    "store": Kind(
        _store,
        (
            (*_STREAM, *_TOKENS),
            ("prepare", "--verify", "tokens"),
            (*_STREAM, *_TOKENS, "--fingerprint"),
            (
                "prepare",
                "dataset_type=jsonl",
                "dataset_path=a.jsonl",
                "--output",
                "tokens",
                "--workers",
                "1",
            ),
        ),
        10,
        True,
    ),
    "huggingface": Kind(
        _huggingface,
        (
            ("plan", "model_name=auto", "load_parameters_path=hf"),
            ("score", "hf", "page.jsonl"),
            ("export", "hf", "--output", "out"),
            ("config", "model_name=auto", "load_parameters_path=hf"),
            ("plan", "model_name=auto", "load_parameters_path=hf"),
            ("export", "hf", "--output", "out"),
        ),
        12,
        True,
    ),
    "run": Kind(
        _trained,
        (
            ("train", *_TRAINED, "steps=6"),
            ("train", *_TRAINED, "steps=6"),
            ("report", "run"),
            ("export", "run", "--output", "out"),
            ("score", "run", "page.jsonl"),
            ("generate", "run", "--max-new-tokens", "4"),
            ("critical-batch", "run"),
            ("export", "run/checkpoints/4", "--output", "out"),
            ("train", *_RUN, "run_dir=other", "load_parameters_path=run"),
        ),
        12,
        True,
    ),
    "programs": Kind(_compiled, (("train", *_COMPILED),), 3, True),
}

_VALUES: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    "",
    "x",
    0,
    -1,
    0.5,
    2**31,
    2**63,
    2**64,
    -(2**63),
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "9" * 5000,
    "\x1b[31m",
    "</script><script>alert(1)</script>",
    "\u202e",
    "a\nb",
    [[]],
    [None],
    {"a": None},
    [1, "2"],
    "../../x",
    "/etc/passwd",
    "NaN",
    "-inf",
    "\ud800",
    10**399,
)
_SNIPPETS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"9" * 400,
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"[" * 20000,
    b'{"a":' * 20000,
    b"null",
    b"{}",
    b"[]",
    b"\n" * 1000,
    b"\r\n",
    b"\r",
    b"\x1b[2J",
    b"!!python/object/apply:os.system [id]",
    b"&a [*a]",
    b"<<: {steps: 3}\n",
    b": : :",
    b"- - - -",
    b"\t",
    b"a" * 5000,
    b"'",
    b'"',
    b"\\",
    b"${A}${A}${A}",
    b"$(id)",
    b"`id`",
    b"{{ x }}{% for i in range(10**10) %}x{% endfor %}",
    b"\xe2\x80\xae",
    b"-1",
    b"0",
    b"1e-400",
    b"---\n",
    b"? ",
    b"%",
    b"#",
    b"|",
    b"a: &a [x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\n",
    b"steps: 3\nsteps: 4\n",
    b"</script>",
)


def make_file_case(
    seed: int, kinds: Sequence[str], base_of: Callable[[str], Path], number: int
) -> Case:
    """Returns the damaged file of a number and a command that reads it.

    Args:
      seed: of the whole run.
      kinds: those to choose from.
      base_of: returns a folder of sound files of a kind, of which the case is a copy.
      number: of the case.
    """
    rng = random.Random(f"file {seed} {number}")
    name = rng.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
    base = base_of(name)
    files = sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())
    arguments = rng.choice(KINDS[name].commands)
    damages = tuple(_damage(rng, rng.choice(files)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return Case(f"file {number}", arguments, base, damages)


def _damage(rng: random.Random, file: str) -> Damage:
    seed = rng.getrandbits(64)
    if rng.random() < 0.12:
        kind = rng.choice(list(_REPLACEMENTS))
        return Damage(file, kind, lambda path: _replace(path, kind))
    if rng.random() < 0.6:
        return Damage(
            file,
            f"a value replaced ({seed})",
            lambda path: _change_value(path, random.Random(seed)),
        )
    return Damage(
        file, f"bytes changed ({seed})", lambda path: _change_bytes(path, random.Random(seed))
    )


def _as_deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def _as_long_line(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)  # zeros that take no room


def _as_text_of_size(path: Path) -> None:
    path.write_bytes(b"a: 1\n" * 4_000_000)


_REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "a folder": Path.mkdir,
    "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "random bytes": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "100,000 brackets": _as_deep,
    "3 GB of zeros": _as_long_line,
    "20 MB of lines": _as_text_of_size,
    "20 MB of newlines": lambda path: path.write_bytes(b"\n" * 20_000_000),
    "null": lambda path: path.write_bytes(b"null"),
    "a list": lambda path: path.write_bytes(b"[1, 2]"),
    "a text": lambda path: path.write_bytes(b'"x"'),
}


def _replace(path: Path, kind: str) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    _REPLACEMENTS[kind](path)


def _change_bytes(path: Path, rng: random.Random) -> None:
    if not _is_small_file(path):
        return
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(content) + 1)
        length = rng.choice((1, 4, 8, 100, 5000))
        how = rng.randrange(6)
        if how == 0:
            del content[place:]
        elif how == 1:
            del content[place : place + length]
        elif how == 2:
            content[place:place] = rng.choice(_SNIPPETS)
        elif how == 3:
            content[place : place + length] = rng.randbytes(length)
        elif how == 4:
            content[place:place] = content[place : place + length]
        elif place < len(content):
            content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _change_value(path: Path, rng: random.Random) -> None:
    """Replaces a value of JSON, of a line of JSON, of YAML, or of the header of safetensors; else
    some bytes.
    """
    if not _is_small_file(path):
        return
    content = path.read_bytes()
    if path.suffix == ".safetensors" and len(content) > 8:
        size = int.from_bytes(content[:8], "little")
        header = _changed_json(content[8 : 8 + size], rng)
        if header is not None:
            path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
            return
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    if (changed := _changed_json(content, rng)) is not None:
        path.write_bytes(changed)
    elif (line := _changed_json(lines[place], rng)) is not None:
        path.write_bytes(b"\n".join((*lines[:place], line, *lines[place + 1 :])))
    elif b": " in lines[place] or b"=" in lines[place]:
        mark = b": " if b": " in lines[place] else b"="
        key, _, _ = lines[place].partition(mark)
        value = _dumped(rng.choice(_VALUES)) if rng.random() < 0.5 else rng.choice(_SNIPPETS)
        path.write_bytes(b"\n".join((*lines[:place], key + mark + value, *lines[place + 1 :])))
    else:
        _change_bytes(path, rng)


def _is_small_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < 50_000_000


def _dumped(value: Any) -> bytes:
    sys.set_int_max_str_digits(0)
    return json.dumps(value).encode()


def _changed_json(content: bytes, rng: random.Random) -> bytes | None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict | list):
        return None
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        for key, below in items:
            places.append((value, key))
            walk(below)

    walk(found)
    if not places:
        return None
    parent, key = rng.choice(places)
    how = rng.randrange(8)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[rng.choice(("", "x" * 5000, "</script>", "\x1b", f"{key} "))] = parent.pop(key)
    elif how == 2:
        parent[key] = [parent[key]]
    elif how == 3:
        parent[key] = str(parent[key])
    elif how == 4 and isinstance(parent[key], int | float):
        parent[key] = -parent[key] if rng.random() < 0.5 else float(parent[key])
    else:
        parent[key] = rng.choice(_VALUES)
    return _dumped(found)
