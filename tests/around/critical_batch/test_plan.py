"""Plans of a measurement: checkpoints, batches, lengths and refusals."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.critical_batch.measured_run import MeasuredRun
from maxbatch.around.critical_batch.plan import make_plan
from maxbatch.config.loading import dump_config
from maxbatch.config.paths import configs_dir
from tests.helpers.measured_runs import factors, fake_run


def planned(path: Path, devices: int = 1, **stated):
    asked = {"steps": None, "factors": None, "samples": None, "scaling": "sqrt"} | stated
    return make_plan(MeasuredRun.read(path, devices), **asked)


def works(error: pytest.ExceptionInfo[ConfigError]) -> tuple[str, str]:
    """The flag, or the key, and the value that a message names."""
    assert "\n" not in str(error.value)
    found = re.search(r"works: (?:--)?(\w+)[ =](\S+)$", str(error.value))
    assert found, str(error.value)
    return found[1], found[2]


def test_checkpoints_are_spread_over_the_logarithm_without_warmup_and_end(tmp_path):
    run = fake_run(tmp_path / "run", updates=1600, every=80)
    steps = [fork.step for fork in planned(run).forks]
    assert steps == [160, 320, 720, 1520]


def test_every_branch_of_a_plan_is_whole_updates_of_equal_samples(tmp_path):
    plan = planned(fake_run(tmp_path / "run"), factors=factors("1/2,1,3,4"), samples=1000)
    assert plan.samples >= 1000 and plan.samples % (16 * 3) == plan.samples % (16 * 4) == 0
    for fork in plan.forks:
        for branch in plan.branches(fork):
            assert plan.samples % branch.batch_size == 0 == plan.compared % branch.batch_size
    assert Fraction(1, 4) <= Fraction(plan.compared, plan.samples) <= Fraction(1, 2)


def test_defaults_are_those_that_the_run_is_long_enough_for(tmp_path):
    assert planned(fake_run(tmp_path / "long", updates=640)).factors[-1] == 8
    assert planned(fake_run(tmp_path / "short", updates=160)).factors[-1] == 2


def test_a_run_too_short_to_tell_is_refused_with_what_works(tmp_path):
    run = fake_run(tmp_path / "run", updates=320)
    with pytest.raises(ConfigError, match="too short to tell") as error:
        planned(run, factors=factors("1/2,1,2,4,8"))
    name, value = works(error)
    assert name == "factors"
    assert planned(run, factors=factors(value)).factors[-1] == 4

    shorter = fake_run(tmp_path / "shorter", updates=80)
    with pytest.raises(ConfigError, match="too short to tell") as error:
        planned(shorter)
    name, value = works(error)
    assert name == "samples" and planned(shorter, samples=int(value), factors=factors("1,2"))

    shortest = fake_run(tmp_path / "shortest", updates=20, every=10, first=10)
    with pytest.raises(ConfigError, match="too short to tell") as error:
        planned(shortest)
    name, value = works(error)
    assert name == "train_samples"
    assert planned(fake_run(tmp_path / "longer", updates=int(value) // 16))


def test_a_branch_of_too_few_updates_is_refused(tmp_path):
    run = fake_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="at least 8 updates") as error:
        planned(run, factors=factors("1,8"), samples=100)
    assert planned(run, factors=factors("1,8"), samples=int(works(error)[1])).samples == 8 * 128


@pytest.mark.runs
def test_what_a_refusal_names_is_not_refused_in_turn(tmp_path):
    for updates in (48, 70, 80, 100, 160, 230):
        run = fake_run(tmp_path / str(updates), updates=updates, every=10, first=10)
        for chosen in (None, "1/2,1,2", "1,3,5", "1,8"):
            for samples in (None, 100, 240, 480, 512, 2000):
                stated = {"samples": samples, "factors": factors(chosen) if chosen else None}
                try:
                    planned(run, **stated)
                except ConfigError as error:
                    advice = str(error).partition("works: ")[2]
                    flags = dict(re.findall(r"--(\w+) (\S+)", advice))
                    assert flags or advice.startswith("train_samples="), str(error)
                    if flags:
                        stated |= {"samples": int(flags["samples"])} if "samples" in flags else {}
                        stated |= (
                            {"factors": factors(flags["factors"])} if "factors" in flags else {}
                        )
                        planned(run, **stated)


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    run = fake_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="max_num_checkpoints_to_keep=null") as error:
        planned(run, steps=[100])
    assert planned(run, steps=[int(works(error)[1])]).forks[0].step == 80
    bare = fake_run(tmp_path / "bare", first=10**6)
    with pytest.raises(ConfigError, match="no checkpoints"):
        planned(bare)


def test_a_batch_that_the_devices_cannot_hold_is_refused_with_what_they_can(tmp_path):
    run = fake_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="divisible by 16 ") as error:
        planned(run, devices=16, factors=factors("1/2,1,2"))
    plan = planned(run, devices=16, factors=factors(works(error)[1]))
    assert plan.factors == (1, 2)
    assert planned(run, devices=16).factors == (1, 2, 4, 8)  # nobody asked for the half
    with pytest.raises(ConfigError, match="must be whole") as error:
        planned(run, factors=factors("1/3,1,2"))
    assert planned(run, factors=factors(works(error)[1]))


def test_a_ramp_is_measured_by_its_own_rule_alone(tmp_path):
    run = fake_run(tmp_path / "run", "batch_size_schedule=0:8 2000:16", "global_batch_size=null")
    with pytest.raises(ConfigError, match="states one rule for all of its rates") as error:
        planned(run)
    assert planned(run, scaling=works(error)[1])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run here"):
        MeasuredRun.read(tmp_path, 1)


def test_a_run_of_reinforcement_learning_is_refused(tmp_path):
    config = load_config(configs_dir() / "post_train" / "rl.yml")
    (tmp_path / "config.yml").write_text(dump_config(config))
    with pytest.raises(ConfigError, match="a run of maxbatch rl"):
        MeasuredRun.read(tmp_path, 1)
