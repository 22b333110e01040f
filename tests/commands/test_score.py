"""Scores are the log-probabilities of the model, on any mesh, with the weights of training."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch.around.loaded_model import LoadedModel
from maxbatch.cli import main
from maxbatch.data.stream.stream import open_stream
from maxbatch.run.pretraining import train
from tests.helpers.chats import chat_config, some_talks, talk
from tests.helpers.corpus import write_jsonl
from tests.helpers.parameters import load_parameters
from tests.helpers.tiny import TINY_MODEL

TALKS = some_talks(8)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on conversations, in bfloat16 with a mesh of its own."""
    folder = tmp_path_factory.mktemp("run")
    config = chat_config(
        folder,
        TALKS,
        *TINY_MODEL,
        "max_target_length=64",
        f"run_dir={folder / 'run'}",
        "steps=2",
        "generate_prompt=",
        "per_device_batch_size=2",
        "ici_tensor_parallelism=2",
        "dtype=bfloat16",
        "scan_layers=true",
    )
    with jax.numpy_dtype_promotion("standard"):
        train(config, jax.devices()[:2])
    return folder / "run"


def scored(
    capsys: pytest.CaptureFixture[str], run_dir: Path, records: list[dict[str, Any]], *flags: str
) -> dict[str, Any]:
    capsys.readouterr()
    assert (
        main(["score", str(run_dir), str(write_jsonl(Path("a.jsonl"), records)), "--json", *flags])
        == 0
    )
    return json.loads(capsys.readouterr().out)


@cache
def model(run_dir: Path) -> Any:
    _, graphdef, params = load_parameters(
        run_dir, ["dtype=float32", "ici_tensor_parallelism=1", "scan_layers=true"]
    )

    @jax.jit
    def softmax(row_1xL: jax.Array) -> jax.Array:
        decoder = nnx.merge(graphdef, params)
        return jax.nn.log_softmax(
            decoder.hidden(row_1xL, row_1xL * 0 + 1).x_MxLxD[0] @ decoder.output_projection()
        )

    return softmax


def softmax_of(run_dir: Path, tokens: list[int]) -> np.ndarray:
    """float32[n, V]: the log-probabilities of all tokens after each token of one row by itself."""
    row_1xL = np.zeros((1, 160), np.int32)
    row_1xL[0, : len(tokens)] = tokens
    return np.asarray(model(run_dir)(row_1xL))[: len(tokens)]


def expected(run_dir: Path, tokens: list[int]) -> np.ndarray:
    """The log-probabilities of a single row, from the whole softmax in float32."""
    return softmax_of(run_dir, tokens)[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.runs
def test_tokens_have_the_log_probabilities_of_the_model_as_given(run_dir: Path, capsys) -> None:
    rows = [[5, 9, 300, 7], [1, 2], list(range(16)), [4], []]
    found = scored(capsys, run_dir, [{"tokens": row} for row in rows])
    for row, record in zip(rows, found["records"], strict=True):
        assert len(record["logprobs"]) == len(record["weights"]) == max(0, len(row) - 1)
        if len(row) > 1:
            np.testing.assert_allclose(record["logprobs"], expected(run_dir, row), atol=1e-5)
            assert record["loss"] == pytest.approx(-np.mean(record["logprobs"]))
    assert found["records"][3]["loss"] is None
    every = [x for record in found["records"] for x in record["logprobs"]]
    assert found["loss"] == pytest.approx(-np.mean(every))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_rows_in_one_pass_change_no_score_and_the_likeliest_tokens_are_known(run_dir: Path) -> None:
    likeliest = int(softmax_of(run_dir, [5, 9])[1].argmax())
    rows = [[5, 9, likeliest, 7], [1, 2], list(range(16)), [4], []]
    found = LoadedModel(str(run_dir)).scorer(3)([np.array(row) for row in rows])
    assert found[0].is_likeliest[1]
    for row, scores in zip(rows, found, strict=True):
        assert len(scores.logprobs) == len(scores.is_likeliest) == max(0, len(row) - 1)
        if len(row) > 1:
            np.testing.assert_allclose(scores.logprobs, expected(run_dir, row), atol=1e-5)
            assert (
                scores.is_likeliest.tolist()
                == (softmax_of(run_dir, row)[:-1].argmax(1) == row[1:]).tolist()
            )


@pytest.mark.parametrize(
    "mesh",
    [
        (),
        ("ici_tensor_parallelism=2", "ici_context_parallelism=2", "context_parallel_strategy=ring"),
        ("ici_pipeline_parallelism=2",),
    ],
)
def test_every_mesh_gives_the_same_scores(run_dir: Path, capsys, mesh: tuple[str, ...]) -> None:
    rows = [[5, 9, 300, 7], list(range(16))]
    found = scored(capsys, run_dir, [{"tokens": row} for row in rows], *mesh)
    for row, record in zip(rows, found["records"], strict=True):
        np.testing.assert_allclose(record["logprobs"], expected(run_dir, row), atol=1e-5)


def test_conversations_have_the_tokens_and_weights_of_training(run_dir: Path, capsys) -> None:
    config = chat_config(run_dir.parent, None, "packing=false", "max_target_length=256")
    stream = open_stream(config)
    found = scored(capsys, run_dir, TALKS[:2])
    for number, record in enumerate(found["records"]):
        sample = stream[number]
        real = sample["segments"] > 0
        assert record["weights"] == sample["weights"][real][1:].tolist()
        np.testing.assert_allclose(
            record["logprobs"], expected(run_dir, sample["tokens"][real].tolist()), atol=1e-5
        )
    weights, losses = zip(*((sum(r["weights"]), r["loss"]) for r in found["records"]), strict=True)
    assert found["loss"] == pytest.approx(np.average(losses, weights=weights))


def test_texts_are_tokenised_by_the_models_tokenizer(run_dir: Path, capsys) -> None:
    found = scored(
        capsys, run_dir, [{"text": "the quick fox"}, {"prompt": "the", "completion": " fox"}]
    )
    tokenizer = open_stream(chat_config(run_dir.parent, None)).tokenizer
    ids = tokenizer.encode("the quick fox").tolist()
    np.testing.assert_allclose(found["records"][0]["logprobs"], expected(run_dir, ids), atol=1e-5)
    assert found["records"][0]["weights"] == [1] * (len(ids) - 1)
    assert found["records"][1]["weights"][-1] == 1


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"tokens": [1, 320]},
            "line 2: token 320 is not an id of this model, whose ids are 0 to 319",
        ),
        ({"tokens": "ab"}, "line 2: field tokens must be a list of whole numbers"),
        ({"text": 3}, "line 2: field text is a int"),
        (
            {"body": 3},
            "line 2: needs text, tokens, messages, or prompt and completion; its fields: 'body'",
        ),
        (talk("a"), "line 2: ends with a message of the user, and no message of the assistant"),
    ],
)
def test_a_record_that_cannot_be_scored_is_one_line(
    run_dir: Path, capsys, record: Any, problem: str
) -> None:
    file = write_jsonl(Path("a.jsonl"), [{"tokens": [1, 2]}, record])
    assert main(["score", str(run_dir), str(file)]) == 2
    assert problem in capsys.readouterr().err


def test_bad_records_are_left_out_and_counted_if_asked(run_dir: Path, capsys) -> None:
    file = write_jsonl(Path("a.jsonl"), [{"tokens": [1, 2]}, {"text": None}, {"tokens": [1, 2]}])
    file.write_text(file.read_text() + "no JSON\n")
    assert main(["score", str(run_dir), str(file), "--json", "skip_bad_records=true"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [record["record"] for record in found["records"]] == [1, 3]
    assert [record["record"] for record in found["skipped_records"]] == [2, 4]
    assert "2 records left out: 1 x field text is null, not a text, 1 x not JSON" in printed.err


def test_equal_records_are_left_out_and_counted_if_asked(run_dir: Path, capsys) -> None:
    file = write_jsonl(
        Path("a.jsonl"), [{"tokens": [1, 2]}, {"tokens": [1, 3]}, {"tokens": [1, 2], "id": 3}]
    )
    assert main(["score", str(run_dir), str(file), "--json", "deduplicate=true"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [record["record"] for record in found["records"]] == [1, 2]
    assert found["skipped_records"] == [
        {"record": 3, "reason": f"equal to record 1 of {file.absolute()}"}
    ]
    assert "1 record left out: 1 x equal to an earlier record" in printed.err


def test_records_of_a_table_are_scored_by_the_names_of_its_columns(run_dir: Path, capsys) -> None:
    Path("a.csv").write_text("body,more\nab,1\n")
    assert main(["score", str(run_dir), "a.csv", "--json", "record_fields={text: body}"]) == 0
    of_table = json.loads(capsys.readouterr().out)
    write_jsonl(Path("a.jsonl"), [{"text": "ab"}])
    assert main(["score", str(run_dir), "a.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == of_table


def test_people_see_the_loss_of_each_record(run_dir: Path, capsys) -> None:
    file = write_jsonl(Path("a.jsonl"), [{"tokens": [1, 2, 3]}, {"tokens": [1]}])
    assert main(["score", str(run_dir), str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("record 1  tokens 2  loss ")
        and lines[1] == "record 2  tokens 0  loss -"
    )
    assert lines[2].startswith("2 records  tokens 2  loss ")


def test_a_file_that_is_not_there_is_one_line(run_dir: Path, capsys) -> None:
    assert main(["score", str(run_dir), "nothing.jsonl"]) == 2
    assert "FILE='nothing.jsonl'" in capsys.readouterr().err
