"""Files from outside are read within bounds, and a refusal names the bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from maxbatch.system.storage.bounded import (
    RefusedContent,
    has_too_many_values,
    read_bytes,
    read_json,
    read_text,
)
from maxbatch.system.storage.bounded_yaml import compose_yaml

NINES = "a: &a [1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bytes(file, "file", 5) == b"12345"
    with pytest.raises(RefusedContent, match="file: is larger than 4 bytes, the most that is read"):
        read_bytes(file, "file", 4)


def test_a_pipe_that_never_ends_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedContent, match="regular file"):
        read_bytes(tmp_path / "pipe", "pipe", 4)


def test_text_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\xff")
    with pytest.raises(RefusedContent, match=r"UTF-8 text \(byte 1\)"):
        read_text(tmp_path / "file", "file", 4)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("[" * 100_000, "nested more than 100 deep"),
        ('{"a":' * 100_000, "nested more than 100 deep"),
        ("[1e400]", "1e400 overflows"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("9" * 5000, "has 5000 digits"),
        ('{"a": 1, "a": 2}', "'a' is stated twice"),
        (b"\xff\xff", "is not JSON"),
        (b'{"a": ["\\uD800"]}', "half of a surrogate pair"),
        ("[],", "is not JSON"),
        ("[" + "[]," * 3_000_000 + "[]]", "more than 5,000,000 values"),
        (b" " * (17 << 20), "larger than 16 MB"),
    ],
)
def test_json_beyond_a_bound_is_refused_by_its_name(content: str | bytes, says: str) -> None:
    with pytest.raises(RefusedContent, match=f"^file: .*{says}"):
        read_json(content, "file", unique=True)


def test_json_within_the_bounds_is_what_it_states() -> None:
    assert read_json('{"a": [1, 2.5, 1000000000000000019884624838656, "x"]}', "file") == {
        "a": [1, 2.5, 1000000000000000019884624838656, "x"]
    }
    assert read_json(b'"\\ud83d\\ude00"', "file") == "\U0001f600"
    assert read_json("[" * 100 + "]" * 100, "file")
    assert read_json('[[1], {"a": 2}]', "file", most_depth=2) == [[1], {"a": 2}]
    assert read_json('{"a": 1, "a": 2}', "file") == {"a": 2}
    assert read_json("[Infinity]", "file", finite=False) == [float("inf")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NINES, "expands by its aliases to more than 50,000 values"),
        ("&a [*a]", "never ends"),
        ("[" * 50_000, "nested more than 100 deep"),
        ("- " * 50_000, "nested more than 100 deep"),
        ("? " * 50_000, "nested more than 100 deep"),
        ("[" + "1," * 60_000 + "]", "more than 50,000 values"),
    ],
)
def test_yaml_beyond_a_bound_is_refused_by_its_name(text: str, says: str) -> None:
    started = time.monotonic()
    with pytest.raises(RefusedContent, match=f"^file: .*{says}"):
        compose_yaml(text, "file")
    assert time.monotonic() - started < 8


def test_yaml_within_the_bounds_is_composed_as_pyyaml_does() -> None:
    text = "a: &x [1, 2]\nb: *x\nc: {d: 'e'}\n"
    assert yaml.serialize(compose_yaml(text, "file")) == yaml.serialize(
        yaml.compose(text, Loader=yaml.SafeLoader)
    )
    assert compose_yaml("", "file") is None
    with pytest.raises(yaml.YAMLError):
        compose_yaml("a: [", "file")


def test_a_long_yaml_is_refused_before_it_is_read() -> None:
    started = time.monotonic()
    with pytest.raises(RefusedContent, match="text: is larger than 1 MB, the most that is read"):
        compose_yaml("{0: '" + "a" * 20_000_000 + "'}", "text")
    assert time.monotonic() - started < 1


def test_commas_in_a_long_text_are_no_values() -> None:
    long = b'{"text": "' + b"a," * (10 << 20) + b'"}'
    assert not has_too_many_values(long)
    assert has_too_many_values(b'{"list": [' + b"[]," * 6_000_000 + b"0]}")
