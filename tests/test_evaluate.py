"""Scores of lm-evaluation-harness: the same for any batch and devices, and equal to
transformers'.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import pytest
import yaml

import maxbatch
from maxbatch.around.harness.run_model import figures
from maxbatch.around.huggingface.export.model import export_model
from maxbatch.cli import main
from maxbatch.data.tokenizers.tokenizers import make_tokenizer
from maxbatch.parallel.mesh import make_mesh
from maxbatch.run.pretraining import train
from tests.helpers.chats import write_tokenizer
from tests.helpers.corpus import write_jsonl
from tests.helpers.tiny import TINY_MODEL, read_metrics
from tests.helpers.yaml_bombs import bomb

COLOURS = ["red", "orange", "yellow", "green", "blue", "violet"]
TEXTS = [" ".join((COLOURS * 6)[i : i + 18 + i % 5]) + "." for i in range(6)]


def write_tasks(folder: Path) -> Path:
    """A multiple choice, a continuation, a whole text and a completion, on data in the same
    folder.
    """
    choices, pairs, texts, prompts = [], [], [], []
    for i in range(9):
        told, *rest = (COLOURS * 3)[i : i + 3 + i % 4], *(COLOURS * 4)[i + 3 + i % 4 :]
        right = rest[0]
        options = sorted(
            {right, COLOURS[i % 6], COLOURS[(i + 2) % 6], "a colour that nobody has seen"}
        )
        choices.append(
            {"question": " ".join(told), "options": options, "answer": options.index(right)}
        )
        pairs.append({"text": " ".join(told), "next": (right, "grey", "violet")[i % 3]})
        texts.append({"page": TEXTS[i % 6] * (1 + i)})
        up_to_stop = "".join(f" {word}" for word in rest[: rest.index("green")])
        prompts.append({"text": " ".join(told), "next": up_to_stop if i else " grey"})
    tasks: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "made_up_choice": (
            choices,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_target": "answer",
                "doc_to_choice": "options",
                "num_fewshot": 2,
                "fewshot_split": "test",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            },
        ),
        "made_up_continuation": (
            pairs,
            {
                "output_type": "loglikelihood",
                "doc_to_text": "{{text}}",
                "doc_to_target": " {{next}}",
                "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
            },
        ),
        "made_up_text": (
            texts,
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{page}}",
                "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
            },
        ),
        "made_up_completion": (
            prompts,
            {
                "output_type": "generate_until",
                "doc_to_text": "{{text}}",
                "doc_to_target": "{{next}}",
                "generation_kwargs": {
                    "until": [".", " green"],
                    "max_gen_toks": 24,
                    "do_sample": False,
                },
                "metric_list": [{"metric": "exact_match"}],
            },
        ),
    }
    folder.mkdir()
    for name, (records, task) in tasks.items():
        file = write_jsonl(folder / f"{name}.jsonl", records)
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **task}))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("evaluate") / "tasks")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt a little of the order of the colours."""
    folder = tmp_path_factory.mktemp("run")
    texts = write_jsonl(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
    write_tokenizer(folder / "tokenizer", None, **special)
    config = maxbatch.load_config(
        overrides=[
            *TINY_MODEL,
            "max_target_length=64",
            "vocab_size=320",
            "dataset_type=jsonl",
            f"dataset_path={texts}",
            "tokenizer_type=huggingface",
            f"tokenizer_path={folder / 'tokenizer'}",
            f"run_dir={folder / 'run'}",
            "steps=40",
            "per_device_batch_size=4",
            "learning_rate=1e-2",
            "generate_prompt=",
            "add_bos=false",
            "eval_interval=-1",
            "eval_fraction=0",
        ]
    )
    train(config, jax.devices()[:1])
    return folder / "run"


def on_devices(run_dir: Path, devices: int) -> maxbatch.LoadedModel:
    model = maxbatch.LoadedModel(str(run_dir))
    vars(model)["mesh"] = make_mesh(model.config, jax.devices()[:devices])
    return model


def assert_same_scores(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for task, metrics in expected.items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert {name: found[task][name] for name in numbers} == pytest.approx(numbers, rel=1e-5), (
            task
        )


class Answers(NamedTuple):
    """The answers of a model of the harness to a few requests."""

    logprobs: list[float]
    are_likeliest: list[bool]
    texts: list[float]
    completions: list[str]

    @classmethod
    def of(cls, model: Any) -> Answers:
        def asked(*requests: tuple[Any, ...]) -> list[Any]:
            return [SimpleNamespace(args=request) for request in requests]

        pairs = [
            ("red orange", " yellow"),
            ("red ", "red"),
            ("", "blue violet"),
            (" ".join(COLOURS * 6), " grey"),
        ]
        rules = {"until": [".", "een"], "max_gen_toks": 12, "do_sample": False}
        found = model.loglikelihood(asked(*pairs))
        return cls(
            [logprob for logprob, _ in found],
            [is_likeliest for _, is_likeliest in found],
            model.loglikelihood_rolling(asked((TEXTS[0] * 9,), ("red",))),
            model.generate_until(
                asked(
                    *((text, dict(rules)) for text in ("red", "green blue", " ".join(COLOURS * 9)))
                )
            ),
        )


@pytest.mark.slow
@pytest.mark.parity
def test_scores_do_not_depend_on_the_batch_or_the_devices_and_are_those_of_transformers(
    tasks: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # the harness would fork
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from maxbatch.around.harness.model import HarnessModel
    from maxbatch.around.harness.tasks import load_tasks

    export_model(str(run_dir), str(tmp_path / "exported"), None)
    theirs = HFLM(
        pretrained=str(tmp_path / "exported"), batch_size=1, device="cpu", dtype="float32"
    )
    names = [str(tasks)]
    expected = evaluator.evaluate(
        theirs, load_tasks(names, "--tasks ", None, None), bootstrap_iters=1000, log_samples=False
    )
    assert expected is not None
    scores = expected["results"]
    assert (
        0 < scores["made_up_choice"]["acc,none"] < 1
        and 0 < scores["made_up_completion"]["exact_match,none"] < 1
    )
    answers = Answers.of(theirs)
    assert any(answers.are_likeliest) and not all(answers.are_likeliest)
    for devices in (1, 4):
        model = on_devices(run_dir, devices)
        for batch_size in (1, 3, 16):
            found = maxbatch.evaluate(model, names, batch_size=batch_size)
            assert_same_scores(found["results"], scores)
        ours = Answers.of(HarnessModel(model))
        assert ours.logprobs == pytest.approx(answers.logprobs, abs=1e-4)
        assert ours.texts == pytest.approx(answers.texts, rel=1e-5)
        assert (ours.are_likeliest, ours.completions) == (
            answers.are_likeliest,
            answers.completions,
        )


@pytest.mark.slow
@pytest.mark.parity
def test_the_command_prints_the_scores_and_refuses_what_it_cannot_run(
    tasks: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert (
        main(
            [
                "evaluate",
                str(run_dir),
                "--tasks",
                str(tasks / "made_up_choice.yaml"),
                "--limit",
                "4",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["n-samples"] == {"made_up_choice": {"original": 9, "effective": 4}}
    assert found["results"]["made_up_choice"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)
    by_name = [
        "evaluate",
        str(run_dir),
        "--include-path",
        str(tasks),
        "--limit",
        "2",
        "--num-fewshot",
        "1",
        "--tasks",
    ]
    assert main([*by_name, "made_up_c*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["made_up_choice", "1", "2"],
        ["made_up_choice", "1", "2"],
        ["made_up_completion", "1", "2"],
        ["made_up_continuation", "1", "2"],
        ["made_up_continuation", "1", "2"],
    ]
    assert main([*by_name, "made_up_choise"]) == 2
    assert capsys.readouterr().err.endswith("file or folder; nearest: made_up_choice\n")
    assert main([*by_name, "made_up_completion", "max_target_length=8"]) == 2
    error = capsys.readouterr().err
    assert (
        "made_up_completion asks for completions of up to 24 tokens" in error
        and "max_target_length=48" in error
    )
    Path("bomb").mkdir()
    Path("bomb/task.yaml").write_text(bomb())
    for tasks_of in (["bomb"], ["bomb/task.yaml"], ["arc_easy", "--include-path", "bomb"]):
        assert main(["evaluate", str(run_dir), "--tasks", *tasks_of]) == 2
        assert (
            "bomb/task.yaml: expands by its aliases to more than 50,000 values"
            in capsys.readouterr().err
        )
    # at a later document
    fails = {"task": "fails", "doc_to_text": "{{text if 'red' in text else text.first.letter}}"}
    task = yaml.safe_load((tasks / "made_up_continuation.yaml").read_text())
    Path("fails.yaml").write_text(yaml.safe_dump(task | fails))
    assert main(["evaluate", str(run_dir), "--tasks", "fails.yaml"]) == 2
    error = capsys.readouterr().err
    assert "fails.yaml: cannot be scored: " in error and "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parity
def test_a_run_scores_tasks_at_its_evals_and_its_losses_stay_as_they_are(
    tasks: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [
        str(run_dir / "config.yml"),
        "learning_rate_schedule=constant",
        "warmup_steps_fraction=0",
        "eval_interval=2",
    ]

    def trained(name: str, *overrides: str) -> list[dict[str, Any]]:
        assert main(["train", *base, f"run_dir={tmp_path / name}", *overrides]) == 0
        return read_metrics(tmp_path / name)

    plain, scored = trained("plain", "steps=4"), trained("scored", "steps=4", f"eval_tasks={tasks}")
    assert [record["loss"] for record in scored] == [record["loss"] for record in plain]
    found = [
        {name: one for name, one in record.items() if name.startswith("eval_task/")}
        for record in scored
    ]
    assert [bool(scores) for scores in found] == [False, True, False, True]
    alone = maxbatch.evaluate(str(tmp_path / "scored"), [str(tasks)])
    assert found[3] == pytest.approx(figures(alone["results"]), rel=1e-5)
    assert {"eval_task/made_up_choice/acc", "eval_task/made_up_completion/exact_match"} <= found[
        3
    ].keys()
    trained("resumed", "steps=2", f"eval_tasks={tasks}")
    resumed = trained("resumed", "steps=4", f"eval_tasks={tasks}")
    assert [{name: record.get(name) for name in found[3]} for record in resumed[1::2]] == [
        found[1],
        found[3],
    ]
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "scored"), "--output", str(page)]) == 0
    assert "made_up_choice/acc_norm" in page.read_text()
    for wrong in ("made_up_choise", str(tmp_path / "plain")):
        capsys.readouterr()
        assert (
            main(
                [
                    "train",
                    *base,
                    f"run_dir={tmp_path / 'none'}",
                    f"eval_tasks={tasks / 'made_up_choice.yaml'},{wrong}",
                ]
            )
            == 2
        )
        assert (
            capsys.readouterr()
            .err.splitlines()[-1]
            .startswith(f"maxbatch: error: eval_tasks={wrong[:20]}")
        )
        assert not (tmp_path / "none" / "metrics.jsonl").exists()


def test_the_scores_of_a_run_have_the_names_of_tasks_and_filters() -> None:
    table = {
        "colours": {
            "alias": "colours",
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "em,strict": 1,
            "f1,none": "N/A",
        }
    }
    assert figures(table) == {"eval_task/colours/acc": 0.5, "eval_task/colours/em,strict": 1.0}


def test_eval_tasks_need_the_harness_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["train", "run_dir=run", "eval_tasks=hellaswag", "dataset_type=synthetic"]) == 2
    assert capsys.readouterr().err == (
        "maxbatch: error: evaluation needs lm-eval, which is not installed; works: pip install "
        "'maxbatch[eval]'\n"
    )
    assert not Path("run", "config.yml").exists()


def test_tasks_are_scored_on_one_host_alone() -> None:
    config = maxbatch.load_config(overrides=["eval_tasks=hellaswag"])
    assert maxbatch.BatchPlan.from_config(config, num_devices=2)
    with pytest.raises(
        maxbatch.ConfigError, match=r"on 2 hosts, since one host scores tasks.*works: eval_tasks=$"
    ):
        maxbatch.BatchPlan.from_config(config, num_devices=2, num_hosts=2)


def test_without_the_harness_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "runs/none", "--tasks", "hellaswag"]) == 2
    assert capsys.readouterr().err == (
        "maxbatch: error: evaluation needs lm-eval, which is not installed; works: pip install "
        "'maxbatch[eval]'\n"
    )


@pytest.mark.parity
def test_requests_are_written_in_the_chat_template_if_asked(
    run_dir: Path, tasks: Path, tmp_path: Path
) -> None:
    model, rows = on_devices(run_dir, 1), list[str]()
    vars(model)["tokenizer"] = make_tokenizer(
        "huggingface", str(write_tokenizer(tmp_path / "chat"))
    )
    vars(model)["context"] = 256
    score = model.scorer()

    def recorded(batch: list[Any]) -> Any:
        rows.extend(model.tokenizer.decode_markup(row.tolist()) for row in batch)
        return score(batch)

    vars(model)["scorer"] = lambda most_rows=None: recorded
    found = maxbatch.evaluate(
        model, str(tasks / "made_up_choice.yaml"), limit=1, num_fewshot=1, apply_chat_template=True
    )
    assert 0 <= found["results"]["made_up_choice"]["acc,none"] <= 1
    begins = "<|im_start|>user\n"  # of the worked example, and of the question
    assert rows and all(
        row.count(begins) == 2 and row.count("<|im_start|>assistant\n") == 2 for row in rows
    ), rows
    answers = {row.rpartition("<|im_start|>assistant\n")[2].strip() for row in rows}
    assert "a colour that nobody has seen" in answers and len(answers) >= 3


@pytest.mark.parity
def test_a_tokenizer_without_a_chat_template_is_one_line(run_dir: Path, tasks: Path) -> None:
    with pytest.raises(maxbatch.ConfigError, match="has no chat template"):
        maxbatch.evaluate(
            on_devices(run_dir, 1),
            str(tasks / "made_up_choice.yaml"),
            limit=1,
            apply_chat_template=True,
        )
