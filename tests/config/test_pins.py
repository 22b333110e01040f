"""Every key has a rule for hosts and for resumes; no difference between two configs is silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch import load_config
from maxbatch.config.keys import Key, Shared
from maxbatch.config.loading import dump_config
from maxbatch.config.pins import changed_since, facts_of, read_written
from maxbatch.config.sections import KEYS, READY_TASKS
from maxbatch.config.values import Value
from maxbatch.parallel.agreement import differences

DEFAULTS = load_config().to_dict()
FACTS = facts_of(DEFAULTS)
PLACES = ("local", "path", "paths")


def other_values(key: Key) -> list[Value]:
    """Values of a key's kind that are not its default's."""
    value = DEFAULTS[key.name]
    by_kind: dict[str, list[Value]] = {
        "bool": [True, False],
        "choice": list(key.choices),
        "choices": [*key.choices, ""],
        "text": ["", "a", "b"],
        **{kind: ["", "/a", "/b"] for kind in PLACES},
    }
    found = by_kind.get(key.kind, [1, 2, 3])
    return [one for one in found if one != value] + (
        [None] if key.nullable and value is not None else []
    )


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, Value, int, set[int]]:
    """A key, another value of it, a number of hosts, and the hosts with that value."""
    key = draw(st.sampled_from(list(KEYS.values())))
    value = draw(st.sampled_from(other_values(key)))
    num_hosts = draw(st.integers(2, 5))
    others = draw(st.sets(st.integers(0, num_hosts - 1), min_size=1, max_size=num_hosts - 1))
    return key.name, value, num_hosts, others


@pytest.mark.runs
@settings(max_examples=3000, deadline=None)
@given(drawn())
def test_one_key_that_differs_on_some_hosts_is_named_with_both_values_or_is_harmless(
    case: tuple[str, Value, int, set[int]],
) -> None:
    name, value, num_hosts, others = case
    changed = facts_of(DEFAULTS | {name: value})
    facts = [changed if host in others else FACTS for host in range(num_hosts)]
    found = differences(facts)
    how = KEYS[name].shared
    if how is Shared.NOTHING or (how is not Shared.VALUE and bool(value) == bool(DEFAULTS[name])):
        assert found == []
        return
    (line,) = found
    texts = [one[name] or "''" for one in facts]
    hosts = {
        text: [str(host) for host, one in enumerate(texts) if one == text]
        for text in dict.fromkeys(texts)
    }
    most = [
        f"{text} on host{'s' * (len(at) > 1)} {', '.join(at[:4])}" for text, at in hosts.items()
    ]
    assert line == f"{name}: {' | '.join(most)}" or max(map(len, texts)) > 40


def test_a_key_whose_value_hosts_need_not_share_names_a_place() -> None:
    """So a new key is compared by value unless its row states otherwise."""
    for name, key in KEYS.items():
        if key.shared is not Shared.VALUE:
            assert key.kind in PLACES or name in ("reward", "skip_samples")
        else:
            assert key.kind not in PLACES, (
                "a path's value says nothing: state what hosts share of it"
            )


def test_a_resume_names_each_key_that_changes_the_run_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    before = ("learning_rate=1e-3", "steps=10", "dataset_type=synthetic", "global_batch_size=16")
    path.write_text(dump_config(load_config(overrides=before)))
    written = read_written(path)
    assert written is not None
    assert changed_since(written, load_config(overrides=before)) == {}
    after = (
        "learning_rate=2e-3",
        "train_samples=160",
        "steps=null",
        "data_cache_dir=/elsewhere",
        "eval_interval=7",
    )
    now = load_config(overrides=[*before, *after])
    lines = changed_since(written, now)
    assert lines.keys() == {"learning_rate", "steps", "train_samples", "eval_interval"}
    assert (
        lines["learning_rate"]
        == "learning_rate: 0.001 before, 0.002 now: changes the learning rate"
    )


def test_another_start_of_a_run_that_goes_on_is_told() -> None:
    now = load_config(overrides=["load_parameters_path=runs/other"])
    change = 'load_parameters_path: "" before, runs/other now'
    nothing = "changes nothing: the run goes on from its own checkpoint"
    assert changed_since(DEFAULTS, now) == {"load_parameters_path": f"{change}: {nothing}"}


def test_the_config_of_a_run_is_read_back_without_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        overrides=["steps=10", "run_dir=a b", f"dataset_type={READY_TASKS[0]}", "batch_size=4"]
    )
    (tmp_path / "config.yml").write_text(dump_config(config))
    monkeypatch.setenv("MAXBATCH_STEPS", "20")
    written = read_written(tmp_path / "config.yml")
    assert written is not None and changed_since(written, config) == {}
    (tmp_path / "config.yml").write_text("steps: [")
    assert read_written(tmp_path / "config.yml") is None


def test_every_key_says_what_a_resume_changes_through_it() -> None:
    assert {name for name, key in KEYS.items() if not key.changes} <= {
        *(name for name, key in KEYS.items() if key.shared is not Shared.VALUE),
        "run_name",
        "model_name",
        "heartbeat_timeout_s",
        "host_wait_s",
        "dataset_type",
        "text_field",
        "record_fields",
        "record_format",
        "grain_worker_count",
        "grain_prefetch_buffer_size",
        "reward_worker_count",
        "overwrite_run",
    }
