"""Every command of README and of the pages in docs/ works unchanged.

By default each one is parsed and its config planned, and what needs no training is run and compared
with the output that the page shows. The tests marked pages run whole pages, in their order, with
few updates of a tiny model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from maxbatch.cli import main, make_parser
from maxbatch.commands import COMMANDS
from maxbatch.config.loading import load_config
from tests.data.store.test_formats import (
    byte_strings,
    example,
    write_gzip,
    write_jsonl,
    write_parquet,
    write_records,
)
from tests.data.tokenizers.test_tokenizers import write_bpe
from tests.helpers.command import maxbatch
from tests.helpers.pages import (
    PAGES,
    REASONS,
    TOP,
    Command,
    blocks_of,
    commands_of,
    is_shown,
    text_of,
)
from tests.helpers.tiny import read_metrics

TEXTS = [f"document {number}: the quick brown fox jumps over the lazy dog" for number in range(40)]
FAST = ("plan", "config", "data", "prepare", "import", "audit", "env", "completion")
WITH_COMMANDS = [page for page in PAGES if commands_of(page)]
OVERVIEWS = ("README.md", "docs/index.md")  # their commands stand on other pages, and run there
CUTS = ("docs/tutorials/first-batch.md", "docs/how-it-works.md")
TRAINING = {
    p for p in WITH_COMMANDS if p not in OVERVIEWS and {c.name for c in commands_of(p)} - set(FAST)
}

TINY = {
    "STEPS": "8",
    "CHECKPOINT_PERIOD": "4",
    "EVAL_STEPS": "1",
    "GENERATE_PROMPT": "",
    "WARM_START_STEPS": "2",
    "BASE_EMB_DIM": "32",
    "BASE_NUM_QUERY_HEADS": "2",
    "BASE_NUM_KV_HEADS": "2",
    "HEAD_DIM": "16",
    "BASE_MLP_DIM": "32",
    "BASE_NUM_DECODER_LAYERS": "1",
    "GRADIENT_NOISE_SCALE": "false",
}
SHORT = {"MAX_TARGET_LENGTH": "64"}
SAMPLED = {"STEPS": "3"}  # of rl, whose updates sample
# twice the 256 samples of a branch, and a step to fork from
MEASURED = {"STEPS": "64", "CHECKPOINT_PERIOD": "16"}
LENGTHS = ("steps", "train_samples", "train_tokens", "num_epochs")
SIZES = ("base_emb_dim", "base_num_decoder_layers", "checkpoint_period", "eval_steps")
MORE = {
    "critical-batch": ("--checkpoints", "16", "--factors", "1,2", "--samples", "256"),
    "generate": ("--max-new-tokens", "8"),
}
STEP_OF = {"replay": "6", "fork": "4"}  # of those few updates
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
SMALL_SWEEP = """
sampler: grid
metric: loss
sweep_dir: runs/batch_size
base: {steps: 8, eval_interval: -1}
parameters: {global_batch_size: [8, 16]}
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """What a user has: here, with a few documents each."""
    for folder in ("books", "shards", "c4", "tfds"):
        (tmp_path / folder).mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / f"books/{number:02}.txt").write_text(text)
    write_jsonl(tmp_path / "web.jsonl", TEXTS[:30], "content")
    write_jsonl(tmp_path / "dump.jsonl", TEXTS[:5], "content")
    write_gzip(tmp_path / "more.jsonl.gz", TEXTS[30:], "content")
    write_parquet(tmp_path / "code.parquet", TEXTS, "content")
    for shard, texts in enumerate((TEXTS[:25], TEXTS[25:])):
        name = f"{shard:05}-of-00002"
        write_parquet(tmp_path / f"shards/train-{name}.parquet", texts, "body")
        write_records(
            tmp_path / f"c4/c4-train.array_record-{name}", [text.encode() for text in texts]
        )
        examples = [example({"text": byte_strings(text.encode())}) for text in texts]
        write_records(tmp_path / f"tfds/tfds-train.array_record-{name}", examples)
    write_bpe(tmp_path, "<|endoftext|>")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2/config.json").write_text(json.dumps(SMOLLM2))
    questions = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(64)]
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in questions)
    )


def write_files_of(page: str) -> None:
    for block in blocks_of(page):
        if block.title:
            Path(block.title).write_text(block.text)


def check_arguments(command: Command) -> Any:
    """Parses a command as `maxbatch` does, and plans the config that it states."""
    args = make_parser(command.name).parse_intermixed_args(command.arguments[1:])
    if command.name in ("train", "rl", "compile", "fit"):
        stated = command.config
        if command.name == "rl" and not any(text.endswith(".yml") for text in stated):
            stated = ["rl", *stated]
        for flag, many in (("--devices", "simulate_devices"), ("--hosts", "simulate_hosts")):
            stated += [flag, str(getattr(args, many))] if getattr(args, many, None) else []
        if command.reason:
            files = [
                text for text in stated if text.endswith(".yml") and Path(text).exists()
            ]  # or made by what is not run
            load_config(files[0] if files else None, [text for text in stated if "=" in text])
        else:
            assert main(["plan", *stated]) == 0
    return args


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_of_a_page_is_one_and_prints_what_is_shown(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files_of(page)
    made: set[str] = set()  # by commands that only the tests marked pages run
    for command in commands_of(page):
        if command.name not in FAST and "--output" in command.arguments:
            made.add(command.arguments[command.arguments.index("--output") + 1])
        elif made & {
            text.rpartition("=")[2].removesuffix("/config.yml") for text in command.arguments
        }:
            make_parser(command.name).parse_intermixed_args(command.arguments[1:])
            continue
        fails = command.shown.startswith("maxbatch: error: ")
        if not fails:
            check_arguments(command)
        capsys.readouterr()
        if command.reason or command.name not in FAST:
            continue
        code = main(list(command.arguments))
        out, err = capsys.readouterr()
        assert code == (2 if fails else 0), (command, err)
        if command.shown:
            assert is_shown(command.shown, err if fails else out), (command, out, err)


@pytest.mark.slow
@pytest.mark.pages
@pytest.mark.parametrize("page", sorted(TRAINING - set(CUTS)))
def test_every_command_of_a_page_runs(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files_of(page)
    run_page(page, monkeypatch, capsys)


def run_page(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[tuple[Command, str]]:
    """Runs the commands of a page in order; returns each with its output."""
    is_measured = any(command.name == "critical-batch" for command in commands_of(page))
    # The cuts of a page are compared with a fingerprint that a command without these keys prints;
    # answers are shorter.
    is_sampled = any(command.name == "rl" for command in commands_of(page))
    # A fork goes on with the length that the page's first command states.
    is_forked = any(command.name == "fork" for command in commands_of(page))
    has_own_length = page in CUTS or is_sampled or is_forked
    keys = (
        TINY
        | (MEASURED if is_measured else {})
        | (SAMPLED if is_sampled else {})
        | ({} if has_own_length else SHORT)
    )
    tiny = {f"MAXBATCH_{key}": value for key, value in keys.items()}
    Path("batch_size").write_text(SMALL_SWEEP)
    printed = []
    for command in commands_of(page):
        if command.reason or command.shown.startswith("maxbatch: error: "):
            continue
        if command.name in FAST:
            code = main(list(command.arguments))
            out, err = capsys.readouterr()
        else:
            with monkeypatch.context() as patch:
                for key, value in tiny.items():
                    patch.setenv(key, value)
                result = maxbatch(*shortened(command))
            code, out, err = result.returncode, result.stdout, result.stderr
        assert code == 0, (command, err)
        printed.append((command, out))
    return printed


def shortened(command: Command) -> list[str]:
    """The command with few updates of a tiny model, as the environment states them, on at most two
    hosts.
    """
    kept = [text for text in command.arguments if text.partition("=")[0] not in (*LENGTHS, *SIZES)]
    if "--simulate-hosts" in kept:
        kept[kept.index("--simulate-hosts") + 1] = "2"
    if command.name in STEP_OF:
        kept[kept.index("--step") + 1] = STEP_OF[command.name]
    return [*kept, *MORE.get(command.name, ())]


def test_the_commands_of_an_overview_stand_on_other_pages() -> None:
    elsewhere = {command.arguments for page in TRAINING for command in commands_of(page)}
    for page in OVERVIEWS:
        assert {c.arguments for c in commands_of(page) if c.name not in FAST} <= elsewhere


@pytest.mark.slow
@pytest.mark.pages
@pytest.mark.parametrize("page", CUTS)
def test_the_cuts_of_a_page_train_on_the_same_samples(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = run_page(page, monkeypatch, capsys)
    printed = [
        output.strip() for command, output in commands if "--fingerprint" in command.arguments
    ]
    cut = [
        read_metrics(run)
        for run in sorted(Path("runs").iterdir())
        if run.name in ("one", "two", "three", "whole", "cut")
    ]
    assert len(cut) >= 2
    prints = [[line["data_fingerprint"] for line in lines] for lines in cut]
    assert prints[1:] == prints[:-1]
    assert printed[0] == prints[0][0 if "first-batch" in page else 1]
    for lines in cut[1:]:
        assert [line["loss"] for line in lines] == pytest.approx(
            [line["loss"] for line in cut[0]], rel=1e-5
        )


@pytest.mark.parametrize(
    "command",
    [
        c
        for c in commands_of("docs/data.md")
        if "--stats" in c.arguments and any(text.startswith("dataset_path") for text in c.arguments)
    ],
    ids=lambda command: " ".join(command.config[:2]),
)
def test_the_example_of_every_format_counts_its_documents(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.arguments, "--json"]) == 0
    documents = 30 if "dataset_path=web.jsonl" in command.arguments else len(TEXTS)
    assert json.loads(capsys.readouterr().out)["documents"] == documents


def test_the_example_of_a_mixture_file_mixes(capsys: pytest.CaptureFixture[str]) -> None:
    write_files_of("docs/data.md")
    assert main(["data", "dataset_type=jsonl", "dataset_path=mix.yml", "--stats", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert {name: figures["weight"] for name, figures in stats["sources"].items()} == {
        "web": 0.7,
        "code": 0.3,
    }


def test_prepare_prints_the_training_command_of_its_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare, _, train = (list(command.arguments) for command in commands_of("docs/prepare.md"))
    assert main(prepare) == 0
    following = capsys.readouterr().out.splitlines()[-1].removeprefix("next: maxbatch ")
    assert sorted(following.split()) == sorted(train)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_command_that_no_test_sees(page: str) -> None:
    fenced = "".join(block.text for block in blocks_of(page) if block.language in ("console", "sh"))
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    assert not re.search(r"^ {4,}(\$ )?maxbatch [a-z]", text, re.M), (
        "a command in an indented block"
    )
    others = [block for block in blocks_of(page) if block.language not in ("console", "sh")]
    assert not [
        block for block in others if re.search(r"^(\$ )?maxbatch [a-z]+ ", block.text, re.M)
    ]
    assert len(re.findall(r"(?:^|&& )(?:\$ )?maxbatch [a-z]", fenced, re.M)) == len(
        commands_of(page)
    )
    assert all(block.reason.startswith(REASONS) for block in blocks_of(page) if block.reason)


def test_every_command_has_a_page_and_a_row_in_the_readme() -> None:
    shown = {
        command.name for page in PAGES if page.startswith("docs/") for command in commands_of(page)
    }
    assert shown >= COMMANDS.keys()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", text_of("README.md"), re.M)) >= COMMANDS.keys()


def test_the_readme_is_read_in_ten_minutes() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    made = (
        "reference/keys.md",
        "reference/commands.md",
        "reference/exit-codes.md",
        "reference/python.md",
    )
    for link in re.findall(
        r"\]\(([^)#]+?)(?:#[^)]*)?\)", re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    ):
        if not link.startswith("http"):
            target = (TOP / page).parent / link
            assert (
                target.resolve().exists()
                or target.resolve().relative_to(TOP / "docs").as_posix() in made
            ), link
