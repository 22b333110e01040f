"""Imports every training command of a checkout of MaxText, and compares each with a reading of its
own.

    python -m tests.programs.maxtext_commands CHECKOUT [FOLDER ...] [--configs CONFIGS] [--fill]
    [--list]

CHECKOUT is a work tree of MaxText, FOLDERs are below it (default: docs, README.md,
tests/end_to_end), CONFIGS is the `maxtext/configs` of the version that is compared with (default:
src/maxtext/configs of the checkout). A page is the script of its shell blocks, in their order.

Two readings are independent of the importer. bash runs each script with functions in place of all
programs, which gives the commands as a shell reads them. Their settings are the chain of YAML files
that the module or the command names, the file of the model, and the command's own words, as
MaxText's `pyconfig.py` merges them. The exit code is 1 if a command is imported as another one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from maxbatch import ConfigError, load_config
from maxbatch.around.importers import shell
from maxbatch.around.importers.translation import NEEDS_YOU, UNSUPPORTED
from maxbatch.commands.import_config import translated, written
from tests.helpers.maxtext_defaults import modules_of, typed_defaults

# What `--fill` puts in place of what a reader fills in: by the end of a name, in this order.
FILLED = {
    "MODEL_NAME": "llama3.1-8b",
    "PRE_TRAINED_MODEL": "llama3.1-8b",
    "BUCKET": "my-bucket",
    "GCS_BUCKET": "gs://my-bucket",
    "CKPT_PATH": "gs://my-bucket/run/0/items",
    "RESTORE_PATH": "gs://my-bucket/lora/0/items",
    "STEPS": "200",
    "DATASET_PATH": "my-data",
    "MY_DATASET": "my-data",
    "DATA_PATH": "gs://my-data",
    "DATA_COLUMNS": "messages",
    "TRAIN_SPLIT": "train",
    "DATASET_NAME": "HuggingFaceH4/ultrachat_200k",
    "LORA_RANK": "8",
    "LORA_ALPHA": "16",
    "BATCH_SIZE": "2",
    "BATCH_SIZE_PER_DEVICE": "2",
    "LEARNING_RATE": "1e-5",
    "TARGET_LENGTH": "1024",
    "VALUE": "20",
    "QUANTIZATION": "",
    "GCS_BUCKET_PATH": "gs://my-bucket",
    "CHECKPOINT_PERIOD": "100",
    "TOKENIZER": "meta-llama/Llama-3.1-8B",
    "DPO_OR_ORPO": "orpo",
    "QWEN3_480B_A35B": "qwen3-30b-a3b",
}
FOLDERS = ("docs", "README.md", "tests/end_to_end")
# A module or a file of MaxText's that trains, started by Python.
TRAINS = re.compile(
    r"(?:^|[./])(?:trainers[./][\w./]*\btrain(?:_compile|_sft|_sft_native|_dpo|_rl|_distill)?|rl[./]grpo_trainer)(?:\.py)?$"
)
_BLOCK = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*(\w*)[^\n]*\n(.*?)^\1?\2[ \t]*$", re.M | re.S)
_PLACE = re.compile(r"(?<=[=/:\w\-\"'])<([A-Za-z\"][\w .|\"\-]*|)>")
_SHELLS = ("", "bash", "sh", "shell", "console", "text", "none")
_RECORDER = r"""
record() { { printf '%s\0' "$@"; printf '\1\0'; } >&9; return 0; }
command_not_found_handle() { record "$@"; }
cd() { :; }; source() { :; }; exec() { record "$@"; }; sleep() { :; }; read() { return 1; }
python() { record python "$@"; }; python3() { record python3 "$@"; }
mkdir() { :; }; date() { echo '${DATE}'; }; exit() { :; }; trap() { :; }; set() { :; };
"""


_RUN = 'exec 9>&{}; PATH=/nonexistent; W=$1; shift; eval "$W"'


class Command(NamedTuple):
    """A command that trains, as a shell reads it: its program and its arguments."""

    program: str
    arguments: tuple[str, ...]


def scripts(checkout: Path, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each script, and of each page that has shell blocks, as one
    script.
    """
    for folder in folders:
        top = checkout / folder
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            name = str(path.relative_to(checkout))
            if path.suffix in (".sh", ".bash"):
                yield name, path.read_text()
            elif path.suffix in (".md", ".rst", ".ipynb"):
                text = "\n".join(_blocks(path))
                if "train" in text:
                    yield name, text


def _blocks(page: Path) -> Iterator[str]:
    """Yields the shell blocks of a page, and the shell lines of a notebook's cells."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            if source.startswith("%%bash"):
                yield source.partition("\n")[2]
            elif cell["cell_type"] == "code":
                joined = re.sub(r"\\\n", " ", source)
                yield "\n".join(
                    line.strip()[1:] for line in joined.split("\n") if line.strip().startswith("!")
                )
            else:
                yield from _fenced(source)
    else:
        yield from _fenced(text)


def _fenced(text: str) -> Iterator[str]:
    for block in _BLOCK.finditer(text):
        if block[3].lower() in _SHELLS:
            lines = [line.removeprefix(block[1]) for line in block[4].split("\n")]
            yield "\n".join(re.sub(r"^\s*\$ ", "", line) for line in lines)


def filled(text: str) -> str:
    """Fills in a script's placeholders: `<NAME>`, and variables that it never sets."""

    def value_of(found: re.Match[str]) -> str:
        name = re.sub(r"\W+", "_", found[1]).strip("_").upper() or "VALUE"
        known = [end for end in FILLED if name == end] or sorted(
            (end for end in FILLED if name.endswith(end)), key=len
        )
        return (
            FILLED[known[-1]].removeprefix(
                "gs://" if text[: found.start()].endswith("gs://") else "~"
            )
            if known
            else found[0]
        )

    text = _PLACE.sub(value_of, text)
    names = {
        name
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text)
        if not re.search(rf"(?<!\w){name}\+?=", text)
    }
    known = {
        name: value
        for name in names
        if (value := _PLACE.sub(value_of, f"=<{name}>")[1:])[:1] != "<"
    }
    return "".join(f"{name}='{known[name]}'\n" for name in sorted(known)) + text


def bash_commands(text: str, depth: int = 0) -> list[Command]:
    """Returns the commands that train, as bash reads a script in which no program runs.

    Variables that the script reads and never sets hold their own names, `${NAME}`; places to fill
    in (`<NAME>`) too.
    """
    text = _PLACE.sub(
        lambda m: "\\${" + (re.sub(r"\W+", "_", m[1]).strip("_") or "VALUE") + "}", text
    )
    names = set(re.findall(r"\$\{?([A-Za-z_]\w*)(?:\}|\b(?!\}|:?[-=+]))", text))
    names |= set(re.findall(r"\$\{(\w+):?\?", text))
    kept = {
        name for name in names if not re.search(rf"(?<!\w){name}\+?=|\b(for|read)\s+{name}\b", text)
    } - {
        "PWD",
        "HOME",
    }
    defaulted = set(re.findall(r"\$\{(\w+):?[-=]", text))
    placed = "".join(f"{name}='${{{name}}}'\n" for name in sorted(kept - defaulted))
    # nothing is written elsewhere
    text = re.sub(r">+[ \t]*[\"']?(?:/(?!dev/)|\$)[^\s;&|)]*", "> file", text)
    whole = f"{_RECORDER}{placed}builtin set +e\n{text}\n"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        # a loop that waits
        with out.open("wb") as file, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["/bin/bash", "-c", _RUN.format(file.fileno()), "bash", whole],
                cwd=folder,
                env={"HOME": "/home"},
                pass_fds=[file.fileno()],
                timeout=5,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        records = [record.strip("\0").split("\0") for record in out.read_text().split("\1\0")]
    found = []
    for words in records:
        for i, word in enumerate(words):
            if depth < 3 and " " in word and "train" in word and "python" in word:
                found += bash_commands(
                    word.removeprefix("--command=").removeprefix("--COMMAND="), depth + 1
                )
            elif TRAINS.search(word) and (
                i == 0 or words[i - 1] in ("-m", "python", "python3") or word.endswith(".py")
            ):
                found.append(Command(word, tuple(words[i + 1 :])))
                break
    return found


def _read(path: Path) -> dict[str, object]:
    """Returns a YAML file with nested keys joined by dots; numbers as 1.e-5 are numbers."""
    loader = yaml.SafeLoader(path.read_text())
    loaded = loader.get_single_data()
    return _flat(loaded or {})


def _flat(words: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in words.items():
        if isinstance(value, dict) and value and name in ("rl", "dpo", "lora"):
            found |= _flat(value)  # whose words the command states without the block's name as well
        else:
            found[f"{prefix}{name}"] = value
    return found


def _chain(path: Path, configs: Path) -> dict[str, object]:
    words = _read(path)
    base = words.pop("base_config", None)
    if not base:
        return words
    beside = path.parent / str(base)
    return _chain(beside if beside.is_file() else configs / str(base), configs) | words


def resolved(command: Command, configs: Path) -> dict[str, object]:
    """Returns the settings of a command as MaxText merges them; raises FileNotFoundError without
    its file.
    """
    arguments, module = (
        list(command.arguments),
        re.sub(r"^.*?(?=maxtext\.)", "", command.program.removesuffix(".py").replace("/", ".")),
    )
    if arguments and arguments[0].endswith(".yml"):
        named = arguments.pop(0)
        path = configs / re.sub(
            r"^.*configs/+|^.*post_train\W*/(?=sft)", "", re.sub("/+", "/", named)
        )
        if not path.is_file() and (configs / "post_train" / Path(named).name).is_file():
            path = configs / "post_train" / Path(named).name
    else:
        path = configs / modules_of(configs / "pyconfig.py").get(module, "base.yml")
    words = typed_defaults(configs / "types.py") | _chain(path, configs)
    own: dict[str, object] = {}
    for word in arguments:
        name, is_set, value = word.partition("=")
        if is_set:
            try:
                own[re.sub(r"^-+|^(rl|dpo|lora)\.", "", name)] = yaml.safe_load(value)
            except yaml.YAMLError:
                own[name] = value
    model = str((words | own).get("model_name") or "default").replace("-Instruct", "")
    file = configs / "models" / f"{model}.yml"
    of_model = _read(file) if model != "default" and file.is_file() else {}
    found = words | of_model | own | {"MODULE": module.rpartition(".")[2]}
    if (
        "dataset_type" not in own
        and words.get("dataset_type") == "synthetic"
        and ("dataset_path" in own or "dataset_name" in own)
    ):
        # what such a command means, which the table says: the default before 0.2.5
        found["dataset_type"] = "tfds"
    return _scaled(found)


def _scaled(words: dict[str, object]) -> dict[str, object]:
    """Multiplies the dimensions by global_parameter_scale, 2^n: heads and MLP first, then width,
    then layers.
    """
    power = int(float(str(words.get("global_parameter_scale") or 1))).bit_length() - 1
    powers = {
        "base_num_query_heads": 2,
        "base_num_kv_heads": 2,
        "base_mlp_dim": 2,
        "base_emb_dim": 1,
        "base_num_decoder_layers": 0,
    }
    return words | {
        name: int(str(words[name])) << (power + late) // 3 for name, late in powers.items()
    }


def _number(value: object) -> object:
    try:
        return float(str(value))
    except ValueError:
        return str(value)


def differences(
    there: Mapping[str, object], ours: Mapping[str, object], stated: Mapping[str, str]
) -> list[str]:
    """Returns the differences between a command's training there and here, in words."""
    is_rl = there["MODULE"] == "train_rl"
    task = (
        "rl"
        if "batch_size" in stated
        else "pairs"
        if ours["use_dpo"]
        else "sft"
        if ours["use_sft"]
        else "text"
    )
    pairs = [
        ("task", _task(there), task),
        ("max_target_length", there["max_target_length"], ours["max_target_length"]),
        ("learning_rate", there["learning_rate"], ours["learning_rate"]),
        ("warmup_steps_fraction", there["warmup_steps_fraction"], ours["warmup_steps_fraction"]),
        ("adam_b2", there["adam_b2"], ours["adam_b2"]),
        ("adam_weight_decay", there["adam_weight_decay"], ours["adam_weight_decay"]),
        (
            "gradient_clipping_threshold",
            there["gradient_clipping_threshold"],
            ours["gradient_clipping_threshold"],
        ),
    ]
    if is_rl:
        updates = 1.0
        for name in ("num_batches", "num_iterations", "train_fraction", "num_epoch"):
            updates *= float(str(there[name]))
        pairs += [("steps", max(1, int(updates)), ours["steps"])]
        pairs += [(name, there[name], ours[name]) for name in ("batch_size", "num_generations")]
    else:
        names = (
            "steps",
            "gradient_accumulation_steps",
            "packing",
            "lr_schedule_type",
            "data_shuffle_seed",
        )
        pairs += [
            (
                name,
                there[name],
                ours[{"lr_schedule_type": "learning_rate_schedule"}.get(name, name)],
            )
            for name in names
        ]
        pairs += [("ramp", there["enable_rampup_batch_size"], ours["enable_rampup_batch_size"])]
        pairs += [
            ("per_device_batch_size", there["per_device_batch_size"], ours["per_device_batch_size"])
        ]
        kinds = {
            "synthetic": ("synthetic",),
            "tfds": ("tfrecord",),
            "hf": ("parquet", "jsonl"),
            "grain": ("arrayrecord", "parquet", "tfrecord"),
        }
        kind = str(there["dataset_type"])
        pairs += [
            (
                "dataset_type",
                kind,
                kind if ours["dataset_type"] in kinds.get(kind, ()) else ours["dataset_type"],
            )
        ]
    pairs += [("adapters", bool(there.get("enable_lora")), bool(ours["lora_rank"]))]
    pairs += [
        ("parameters", bool(there.get("load_parameters_path")), bool(ours["load_parameters_path"]))
    ]
    widths = (
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "vocab_size",
        "num_experts",
    )
    pairs += [(name, there[name], ours[name]) for name in widths]
    of_expert = ours["base_moe_mlp_dim"] if ours["base_moe_mlp_dim"] != -1 else ours["base_mlp_dim"]
    mlp = _mlp(there)
    pairs += [(mlp, there[mlp], ours[mlp] if mlp == "base_mlp_dim" else of_expert)]
    layers = float(str(there["base_num_decoder_layers"])) * (
        2 if there["decoder_block"] == "gemma2" else 1
    )
    pairs += [("layers", layers, ours["base_num_decoder_layers"])]
    return [
        f"{name}: {left} there, {right} here"
        for name, left, right in pairs
        if _number(left) != _number(right)
    ]


def _mlp(there: Mapping[str, object]) -> str:
    """Returns the name of the MLP's width; an expert's if every layer has experts."""
    dense = int(str(there["num_experts"])) == 1 or int(str(there["first_num_dense_layers"])) > 0
    return "base_mlp_dim" if dense else "base_moe_mlp_dim"


def _task(there: Mapping[str, object]) -> str:
    module = str(there["MODULE"])
    return {"train_rl": "rl", "train_distill": "distillation"}.get(
        module, "pairs" if there.get("use_dpo") else "sft" if there.get("use_sft") else "text"
    )


class Outcome(NamedTuple):
    """What became of one command: `imported`, `needs you`, `refused`, or `surprise`, and why."""

    where: str
    command: Command
    became: str
    why: str


def outcomes(name: str, text: str, folder: Path, configs: Path) -> Iterator[Outcome]:
    """Writes a script into `folder` and yields the fate of each of its commands."""
    path = folder / (re.sub(r"\W", "_", name) + ".sh")
    path.write_text(text)
    shells = Counter(bash_commands(text))
    try:
        found = [
            (i, one)
            for i, one in enumerate(shell.commands_of(path), 1)
            if TRAINS.search(one.program)
        ]
        numbers, read = (
            [i for i, _ in found],
            [Command(one.program, tuple(one.arguments)) for _, one in found],
        )
    except ConfigError as error:
        read, numbers = [], []
        if shells:
            yield Outcome(name, Command("", ()), "surprise", f"not read: {error}")
    for command in shells:
        if not any(_is_same(command, other) for other in read):
            yield Outcome(
                name, command, "surprise", "bash runs it, and the importer reads no such command"
            )
    for number, command in zip(numbers, read, strict=True):
        yield Outcome(f"{name}#{number}", command, *_became(path, number, command, configs))


def _is_same(left: Command, right: Command) -> bool:
    """Returns whether two readings of a command are the same but for values that are unknown."""
    right = Command(
        right.program, tuple(word for word in right.arguments if not shell.UNSET.fullmatch(word))
    )
    if Path(left.program).name != Path(right.program).name or len(left.arguments) != len(
        right.arguments
    ):
        return False
    pairs = zip(left.arguments, right.arguments, strict=True)
    return all(_is_same_word(one.replace("'", ""), other.replace("'", "")) for one, other in pairs)


def _is_same_word(one: str, other: str) -> bool:
    """Returns whether a word is the same, its value is unknown to the importer, or both are a YAML
    file of one name.
    """
    is_file = one.endswith(".yml") and "=" not in one and Path(one).name == Path(other).name
    return (
        one == other
        or is_file
        or ("$" in other and one.partition("=")[0] == other.partition("=")[0])
    )


def _became(path: Path, number: int, command: Command, configs: Path) -> tuple[str, str]:
    try:
        translation, _ = translated("maxtext", path, number)
        refused = [
            f"{fate.word}={fate.value}: {fate.says}"
            for fate in translation.fates
            if fate.fate == UNSUPPORTED
        ]
        if refused:
            return "refused", "; ".join(refused)
        text = written(translation, path.name)
    except ConfigError as error:
        return "refused", str(error).replace(str(path), "FILE")
    except Exception as error:  # whatever it is, it is a surprise
        return "surprise", f"{type(error).__name__}: {error}"
    run = path.with_suffix(".yml")
    run.write_text(text)
    try:
        there = resolved(command, configs)
    except FileNotFoundError as error:
        return "surprise", f"MaxText has no such file: {error}"
    found = differences(there, load_config(run), translation.settings)
    if found:
        return "surprise", "; ".join(found)
    waits = [
        f"{fate.word}={fate.value}: {fate.says}"
        for fate in translation.fates
        if fate.fate == NEEDS_YOU
    ]
    return ("needs you", "; ".join(waits)) if waits else ("imported", "")


def main() -> int:
    """Prints the outcomes and how many of each there are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--configs", type=Path, help="the folder maxtext/configs of the version")
    parser.add_argument(
        "--fill", action="store_true", help="put values in place of what a reader fills in"
    )
    parser.add_argument("--list", action="store_true", help="print each command")
    args = parser.parse_args()
    configs = (args.configs or args.checkout / "src/maxtext/configs").resolve()
    counts: Counter[str] = Counter()
    reasons: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "src" / "maxtext").mkdir(parents=True)
        (Path(folder) / "src" / "maxtext" / "configs").symlink_to(configs)
        for name, text in scripts(args.checkout, args.folders):
            for outcome in outcomes(
                name, filled(text) if args.fill else text, Path(folder), configs
            ):
                counts[outcome.became] += 1
                if args.list:
                    line = shlex.join([outcome.command.program, *outcome.command.arguments])
                    print(f"{outcome.became}\t{outcome.where}\t{line}\n\t{outcome.why}")
                elif outcome.became in ("refused", "surprise"):
                    reasons.setdefault(f"{outcome.became}: {outcome.why}", []).append(outcome.where)
    for reason, where in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(where)} {reason}\n    {', '.join(where)}")
    print(
        f"{sum(counts.values())} commands: "
        + ", ".join(f"{count} {became}" for became, count in counts.most_common())
    )
    return 1 if counts["surprise"] else 0


if __name__ == "__main__":
    sys.exit(main())
