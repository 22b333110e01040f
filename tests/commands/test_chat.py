"""A model that talks back: fine-tuned here on questions and answers, then asked by its own chat
template.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from maxbatch.cli import main
from maxbatch.run.pretraining import train
from tests.helpers.chats import chat_config, talk
from tests.helpers.terminals import Terminal, plain
from tests.helpers.tiny import read_metrics

pytestmark = pytest.mark.runs

WORDS = (
    "apple",
    "river",
    "stone",
    "glass",
    "garden",
    "music",
    "cat",
    "cloud",
    "bread",
    "train",
    "paper",
    "moon",
)
RECORDS = [talk(f"{a} and {b}?", f"<{b}|{a}>") for a in WORDS for b in WORDS if a != b]
HELD_OUT = RECORDS[9::10]
FORMAT = re.compile(r"<\w+\|\w+>")


class Tuned(NamedTuple):
    run_dir: Path
    printed: str


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A model of the test's own making after 200 updates on made-up questions; every tenth pair is
    held out.
    """
    folder = tmp_path_factory.mktemp("chat")
    run_dir = folder / "run"
    config = chat_config(
        folder,
        RECORDS,
        "base_emb_dim=64",
        "base_num_query_heads=4",
        "base_num_kv_heads=2",
        "head_dim=16",
        "base_mlp_dim=128",
        "base_num_decoder_layers=2",
        "eval_fraction=0.1",
        "eval_interval=100",
        "steps=200",
        "global_batch_size=16",
        "per_device_batch_size=16",
        "packing=false",
        "enable_data_shuffling=true",
        "learning_rate=3e-3",
        "gradient_noise_scale=false",
        "log_to=tensorboard",
        f"run_dir={run_dir}",
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(config, jax.devices()[:2])
    return Tuned(run_dir, printed.getvalue())


def test_a_fine_tuned_model_answers_in_the_trained_format_nine_times_of_ten(
    tuned: Tuned, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for record in HELD_OUT[:10]:
        assert (
            main(
                [
                    "generate",
                    str(tuned.run_dir),
                    "--chat",
                    "--prompt",
                    record["messages"][0]["content"],
                ]
            )
            == 0
        )
        answers.append(capsys.readouterr().out.removesuffix("\n"))
    assert sum(bool(FORMAT.fullmatch(answer)) for answer in answers) >= 9, answers


def test_the_closing_sample_and_the_next_line_are_a_chat_turn(tuned: Tuned) -> None:
    _, _, sample = tuned.printed.partition("--- a sample ---")
    asked = HELD_OUT[0]["messages"][0]["content"]
    assert f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n<" in sample
    assert f"next: maxbatch generate {tuned.run_dir} --chat\n" in sample


def test_held_out_records_are_answered_at_each_eval_in_tensorboard_and_the_report(
    tuned: Tuned, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len({line["compiles"] for line in read_metrics(tuned.run_dir)[1:]}) == 1, (
        "no eval waits for the sampler"
    )
    lines = [
        json.loads(line) for line in (tuned.run_dir / "answers.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [100, 200]
    expected = [f"{record['messages'][1]['content']}<|im_end|>" for record in HELD_OUT[:4]]
    for line in lines:
        assert [answer["expected"] for answer in line["answers"]] == expected
    last = lines[-1]["answers"][0]
    (events,) = tuned.run_dir.glob("events*")
    assert f"    {last['answer']}".encode() in events.read_bytes()
    assert main(["report", str(tuned.run_dir)]) == 0
    page = (tuned.run_dir / "report.html").read_text()
    assert "Answers to held-out records, after 200 updates" in page
    assert last["answer"].replace("<", "&lt;").replace(">", "&gt;") in page


def test_lines_of_standard_input_are_the_turns_of_a_conversation(
    tuned: Tuned, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("apple and moon?\n\ncat and train?\n"))
    assert (
        main(
            [
                "generate",
                str(tuned.run_dir),
                "--chat",
                "--temperature",
                "0",
                "--max-new-tokens",
                "20",
            ]
        )
        == 0
    )
    found = capsys.readouterr()
    assert FORMAT.match(found.out) and len(found.out.splitlines()) >= 2
    assert "no longer fits" in found.err  # two turns are more than 64 tokens
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", str(tuned.run_dir), "--chat"]) == 2
    assert "--chat: has no message; works: --prompt TEXT" in capsys.readouterr().err


def test_a_chat_model_that_is_asked_without_chat_gets_a_hint(
    tuned: Tuned, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tuned.run_dir), "--prompt", "apple", "--max-new-tokens", "2"]) == 0
    assert "--chat asks the model by it" in capsys.readouterr().err
    assert main(["generate", str(tuned.run_dir), "--prompt", "a", "--system", "Be brief."]) == 2
    assert (
        capsys.readouterr().err
        == "maxbatch: error: --system Be brief.: belongs to --chat; works: --chat --system ...\n"
    )


def test_a_conversation_on_a_terminal_asks_and_answers_until_it_is_closed(tuned: Tuned) -> None:
    terminal = Terminal(
        "generate", str(tuned.run_dir), "--chat", "--temperature", "0", "--system", ""
    )
    terminal.read(lambda written: "> " in written)
    terminal.type("river and cloud?\n")
    terminal.read(lambda written: written.count("> ") > 1)
    terminal.type("\x04")
    assert terminal.end() == 0
    lines = plain(terminal.written)
    assert lines[0].endswith("Ctrl-D ends it.") and any(FORMAT.fullmatch(line) for line in lines)
