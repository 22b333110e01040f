"""Rewards: every response is scored once, for any behaviour of the functions."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.kinds.prompt.reward_functions import ResponseToScore
from maxbatch.kinds.prompt.rewards import ResponseScores, Rewards, parse_rewards
from tests.helpers.processes import alive, pids_of, wait_for

# What the response says is what the function does.
FUNCTIONS = """
    import ctypes, os, re, sys, time
    import helper

    def obeys(prompt, response, record):
        with open(record["log"], "a") as log:
            log.write(response + "\\n")
        if response == "raises":
            raise ValueError("two\\nlines")
        if response == "leaves":
            sys.exit(0)
        if response == "dies":
            os._exit(3)
        if response == "crashes":
            ctypes.string_at(0)
        if response == "sleeps":
            time.sleep(60)
        if response == "spins":  # and never lets go of the interpreter
            re.match("(a+)+b", "a" * 40)
        if response == "eats":
            bytearray(1 << 46)
        return {"nan": float("nan"), "huge": 1e300, "text": "1.0", "none": None}.get(response, len(response))

    def prompt_length(prompt, response, record):
        return len(prompt)

    def imports_jax(prompt, response, record):
        return "jax" in sys.modules

    def helps(prompt, response, record):
        return helper.VALUE

    def process(prompt, response, record):
        time.sleep(0.05)
        return os.getpid()

    def waits(prompt, response, record):
        while not os.path.exists(record["log"]):
            time.sleep(0.01)
        return 0.0

    def takes_away(prompt, response, record):
        del record["log"]
        record["more"] = []
        return "more" in record

    def takes_two(prompt, response):
        return 0.0

    NUMBER = 1
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    path = tmp_path / "functions.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


def rewards(reward: str, *overrides: str) -> Rewards:
    return Rewards(
        load_config(overrides=[f"reward={reward}", "reward_on_failure=-1", *overrides]).rl
    )


def questions(
    responses: list[str], log: Path | str = os.devnull, prompt: str = "p"
) -> list[ResponseToScore]:
    return [ResponseToScore(prompt, response, {"log": str(log)}) for response in responses]


def score(reward: str, responses: list[str], *overrides: str) -> ResponseScores:
    with rewards(reward, *overrides) as scorer:
        return scorer.submit(questions(responses)).result()


def test_a_module_and_a_file_name_the_same_function(functions: Path) -> None:
    for reward in ("functions:obeys", "functions.py:obeys", f"{functions}:obeys"):
        scores = score(reward, ["a", "bb"])
        assert scores.rewards.tolist() == [1, 2]
        assert scores.rewards.dtype == np.float32


def test_a_file_imports_what_lies_beside_it(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = functions.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert score("../functions.py:helps", ["a"]).rewards.tolist() == [7]


def test_several_rewards_add_up_by_their_weights_as_they_are(functions: Path) -> None:
    scores = score("functions:obeys,0.5; functions:prompt_length,-2", ["a", "bbb"])
    assert scores.rewards.tolist() == [0.5 - 2, 1.5 - 2]
    assert {name: values.tolist() for name, values in scores.by_name.items()} == {
        "obeys": [1, 3],
        "prompt_length": [1, 1],
    }


def test_scores_of_several_hosts_are_joined_as_if_one_had_scored_them(functions: Path) -> None:
    terms = "functions:obeys,0.1; functions:prompt_length,3"
    texts = ["raises", "a", "bbb", "cc", "nan"]
    whole = score(terms, texts)
    parts = [score(terms, part).to_json() for part in (texts[:3], [], texts[3:])]
    joined = ResponseScores.joined(json.loads(json.dumps(parts)))
    assert repr(joined) == repr(whole) and whole.failed.sum() == 2


def test_functions_of_one_name_are_called_by_their_whole_term() -> None:
    assert [(term.name, term.weight) for term in parse_rewards("a:f,0.7;b:f,0.3;b:g")] == [
        ("a:f", 0.7),
        ("b:f", 0.3),
        ("g", 1.0),
    ]


@pytest.mark.runs
@pytest.mark.parametrize("workers", [1, 3])
def test_what_goes_wrong_fails_one_response_and_no_other(
    functions: Path, tmp_path: Path, workers: int
) -> None:
    failing = ["raises", "leaves", "dies", "crashes", "nan", "huge", "text", "none"]
    responses = ["a"]
    for number, response in enumerate([*failing, "sleeps"]):
        responses += [response, "b" * (number + 1)]
    expected = [-1 if response in (*failing, "sleeps") else len(response) for response in responses]
    log = tmp_path / "log"
    limit = ("reward_timeout_s=1.5", f"reward_worker_count={workers}")
    with rewards("functions:obeys;functions:prompt_length,0", *limit) as scorer:
        pending = [scorer.submit(questions(responses, log)) for _ in range(2)]
        for scores in (each.result() for each in pending):
            assert scores.rewards.tolist() == expected
            assert scores.by_name["prompt_length"].tolist() == [
                -1 if reward < 0 else 1 for reward in expected
            ]
            assert (scores.failed.sum(), scores.timed_out.sum()) == (len(failing), 1)
            assert scores.problem == "obeys raised ValueError: two lines"
    # Nothing is lost and nothing is asked twice.
    assert sorted(log.read_text().split()) == sorted(responses * 2)


def test_a_function_that_eats_memory_fails_alone_and_says_so(functions: Path) -> None:
    scores = score("functions.py:obeys", ["eats", "a"], "reward_worker_count=1")
    assert scores.rewards.tolist() == [-1, 1]
    assert "raised MemoryError: a reward worker may use" in scores.problem


def test_a_response_that_takes_too_long_says_so(functions: Path) -> None:
    begin = time.monotonic()
    scores = score("functions:obeys", ["spins", "a"], "reward_timeout_s=0.5")
    assert time.monotonic() - begin < 60
    assert scores.rewards.tolist() == [-1, 1]
    assert (scores.failed.sum(), scores.timed_out.sum(), scores.problem) == (
        0,
        1,
        "took more than 0.5 s",
    )


def test_the_limit_is_per_response_not_per_batch(functions: Path) -> None:
    scores = score("functions:process", ["a"] * 40, "reward_timeout_s=1.5")  # of 0.05 s each
    assert scores.timed_out.sum() == 0
    assert len(set(scores.rewards.tolist())) == 1


def test_a_function_that_changes_its_record_changes_no_other(functions: Path) -> None:
    scores = score("functions:takes_away;functions:obeys", ["a"] * 20)
    assert scores.failed.sum() == 0
    assert scores.rewards.tolist() == [2] * 20


def test_workers_do_not_import_jax(functions: Path) -> None:
    assert score("functions:imports_jax", ["a"]).rewards.tolist() == [0]


def test_batches_are_handed_in_at_once_and_keep_their_order_and_lose_nothing_when_all_workers_are_killed(
    functions: Path,
) -> None:
    with rewards(
        "functions:waits;functions:process;functions:obeys", "reward_worker_count=2"
    ) as scorer:
        go = Path("go")
        pending = [
            scorer.submit(questions(["x" * (n + i) for n in range(8)], log=go)) for i in range(3)
        ]
        for pid in pids_of(scorer._pool):
            os.kill(pid, signal.SIGKILL)
        go.touch()  # which the functions waited for
        results = [each.result() for each in reversed(pending)][::-1]
        assert scorer.submit([]).result().rewards.tolist() == []
    for i, scores in enumerate(results):
        assert not scores.failed.any()
        assert scores.by_name["obeys"].tolist() == [n + i for n in range(8)]
    assert len({value for scores in results for value in scores.by_name["process"].tolist()}) == 2


def test_a_batch_of_512_takes_no_time() -> None:
    record = {"prompt": "1+1=", "answer": "200"}
    with rewards("maxbatch.rl.arithmetic:is_right") as scorer:

        def seconds() -> float:
            begin = time.monotonic()
            scores = scorer.submit([ResponseToScore("1+1=", "200", record)] * 512).result()
            assert scores.rewards.sum() == 512
            return time.monotonic() - begin

        wait_for(lambda: seconds() < 0.05)  # a machine that others use needs several attempts


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (
            "obeys",
            "'obeys' is not module:function or FILE.py:function; works: "
            "reward=maxbatch.rl.arithmetic:",
        ),
        ("functions:obeys;", "'' is not module:function"),
        (
            "functions:obeys,heavy",
            "the weight 'heavy' is no finite number; works: functions:obeys,1",
        ),
        ("functions:obeys,inf", "the weight 'inf' is no finite number"),
        ("functions:obeys;functions:obeys,2", "functions:obeys occurs twice"),
        ("no_such:f", "cannot import no_such (ModuleNotFoundError: No module named 'no_such')"),
        ("no_such.py:f", "cannot import no_such.py (FileNotFoundError:"),
        ("functions:obey", "functions has no obey; works: functions:obeys"),
        ("functions:NUMBER", "NUMBER is not a function"),
        (
            "functions:takes_two",
            "takes_two must take (prompt, response, record) (too many positional",
        ),
        ("dies_early:f", "the process ended with exit code 5"),
    ],
)
def test_a_reward_that_cannot_be_used_is_one_line(functions: Path, reward: str, said: str) -> None:
    (functions.parent / "dies_early.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(ConfigError) as error:
        rewards(reward, "reward_worker_count=2").close()
    assert str(error.value).startswith(f"reward={reward!r}: ") and "\n" not in str(error.value)
    assert said in str(error.value)


def test_a_function_that_vanished_fails_responses_and_ends_nothing(functions: Path) -> None:
    with rewards("functions:obeys") as scorer:
        functions.unlink()
        scores = scorer.submit(questions(["dies", "a", "b"])).result()
    assert scores.rewards.tolist() == [-1, -1, -1]
    assert scores.failed.sum() == 3


def test_a_function_that_changed_scores_nothing_in_a_worker_that_replaces_another(
    functions: Path,
) -> None:
    """Two sources would score one batch. A worker that has the old one goes on."""
    before = functions.read_text()
    with rewards(f"{functions}:obeys", "reward_worker_count=1") as scorer:
        functions.write_text(before.replace("len(response)", "-1.0"))
        assert scorer.submit(questions(["four"])).result().rewards.tolist() == [4]
        with pytest.raises(
            ConfigError, match=r"reward: .*functions\.py has changed since this start"
        ):
            scorer.submit(questions(["dies", "four", "four"])).result()
        functions.write_text(before)
        assert scorer.submit(questions(["four"])).result().rewards.tolist() == [4]


def test_closing_ends_the_processes_and_whoever_waits(functions: Path) -> None:
    scorer = rewards("functions:obeys", "reward_worker_count=2")
    pids = pids_of(scorer._pool)
    assert len(pids) == 2 and all(map(alive, pids))
    pending = [scorer.submit(questions(["sleeps"] * 4)), scorer.submit(questions(["a"]))]
    scorer.close()
    assert not any(map(alive, pids))
    for each in pending:
        with pytest.raises(RuntimeError, match="the rewards were closed"):
            each.result()
