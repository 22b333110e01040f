"""Task files of others are bounded before the harness reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maxbatch import ConfigError
from maxbatch.around.harness.task_files import check_task_files
from tests.helpers.yaml_bombs import bomb


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bomb(), "expands by its aliases to more than 50,000 values"),
        ("task: a\nmetric_list: &a [*a]\n", "an alias refers to a value that holds it"),
        (f"task: a\ndoc_to_text: {'[' * 5000}{']' * 5000}\n", "nested more than 100 deep"),
        ("# " + "a" * (1 << 20), "is larger than 1 MB"),
    ],
    ids=["aliases", "endless", "deep", "large"],
)
def test_a_task_file_beyond_a_bound_is_refused_by_name(content: str, said: str) -> None:
    Path("tasks/below").mkdir(parents=True)
    Path("tasks/below/own.yaml").write_text(content)
    Path("includes.yaml").write_text("include: [tasks/below/own.yaml]\ntask: b\n")
    for place in ("tasks", "tasks/below/own.yaml", "includes.yaml"):
        with pytest.raises(ConfigError, match=r"below/own\.yaml") as error:
            check_task_files([place])
        assert said in str(error.value)


def test_a_pipe_is_not_read() -> None:
    os.mkfifo("pipe.yaml")
    with pytest.raises(ConfigError, match="must be a regular file"):
        check_task_files(["."])


def test_files_of_the_harness_pass_and_their_functions_do_not_run() -> None:
    Path("a.yaml").write_text(
        "include: a.yaml\ntask: a\ndoc_to_text: !function ran.text\nx: &x {y: 1}\nz: {<<: *x}\n"
    )
    Path("ran.py").write_text("raise SystemExit('ran')\n")
    Path("no.yaml").write_text("{")
    check_task_files([".", "nowhere.yaml", "a.yaml"])
