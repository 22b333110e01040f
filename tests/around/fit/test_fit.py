"""`maxbatch fit`: few questions, the right answer, memory by kind, and the ways to a wanted
batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.around.compile.compiling import Update
from maxbatch.around.compile.modelled import Modelled
from maxbatch.around.fit.choices import Choice, Sizes, Wanted, choose
from maxbatch.around.fit.search import Line, largest_fitting
from maxbatch.around.fit.view import show
from maxbatch.cli import main
from maxbatch.commands.arguments import config_of
from maxbatch.config.config import Config
from maxbatch.data.feed.placement import BatchShape
from maxbatch.plan.mesh_shape import AXES, MeshShape
from maxbatch.run.compile.compiler import shortage_in
from maxbatch.run.compile.memory import Parts, Verdict
from maxbatch.run.compile.target import Target, device_facts, here
from tests.helpers.tiny import TINY_RUN


@dataclasses.dataclass(frozen=True)
class Said:
    fits: bool
    needed_bytes: int | None


class Compiler:
    """A formula for the memory of a batch, which counts its calls."""

    def __init__(
        self, fixed: int, per_row: int, limit: int, bend: int = 0, mute: bool = False
    ) -> None:
        self.fixed, self.per_row, self.limit, self.bend, self.mute = (
            fixed,
            per_row,
            limit,
            bend,
            mute,
        )
        self.asked: list[int] = []

    def says(self, rows: int) -> Said:
        needed = self.fixed + self.per_row * rows + self.bend * rows * rows
        return Said(needed <= self.limit, None if self.mute else needed)

    def __call__(self, numbers: Sequence[int]) -> list[Said]:
        self.asked += numbers
        return [self.says(rows) for rows in numbers]

    @property
    def fitted(self) -> list[int]:
        return [rows for rows in self.asked if self.says(rows).fits]


@pytest.mark.parametrize("from_above", [False, True], ids=["line", "above"])
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("limit", [1_000, 1_006, 1_007, 5_000, 100_000])
@pytest.mark.parametrize("count", [9, 2**16, 2**40])
def test_the_answer_fits_and_the_next_size_does_not(
    from_above: bool, at_once: int, limit: int, count: int
) -> None:
    estimates = (Line(0, 1), Line(500, 3), Line(2000, 700), Line(10**6, 1))
    for estimate, bend, mute in itertools.product(estimates, (0, 2), (False, True)):
        compiler = Compiler(1_000, 7, limit, bend, mute)
        rows = range(4, 4 * count + 1, 4)
        size = largest_fitting(rows, limit, estimate, compiler, at_once, from_above)
        assert len(compiler.asked) == len(set(compiler.asked)) <= 90
        assert size == 0 or (4 * size in compiler.asked and compiler.says(4 * size).fits)
        if size != count:
            assert 4 * (size + 1) in compiler.asked, "that it does not fit is the compiler's word"
            assert not compiler.says(4 * (size + 1)).fits


@pytest.mark.parametrize("estimate", [Line(900, 9), Line(1_000, 4), Line(300, 20)], ids=str)
@pytest.mark.parametrize("count", [2**16, 2**40])
def test_a_fair_estimate_needs_few_compilations(estimate: Line, count: int) -> None:
    compiler = Compiler(1_000, 7, 2_000)
    assert largest_fitting(range(1, count + 1), 2_000, estimate, compiler) == 142
    assert len(compiler.asked) <= 4


@pytest.mark.parametrize("fixed", [0, 100, 1_000, 1_600])
@pytest.mark.parametrize("per_row", [1, 7, 90])
@pytest.mark.parametrize("estimate", [Line(900, 9), Line(300, 200), Line(0, 1)], ids=str)
def test_from_above_hardly_anything_that_fits_is_compiled(
    fixed: int, per_row: int, estimate: Line
) -> None:
    compiler = Compiler(fixed, per_row, 2_000)
    largest_fitting(range(1, 2**16 + 1), 2_000, estimate, compiler, refusals_are_cheap=True)
    begins_too_low = 4 * int(estimate.rows_within(2_000)) * per_row + fixed <= 2_000
    assert len(compiler.fitted) <= (8 if begins_too_low else 1)


def test_sizes_that_end_need_no_failure() -> None:
    for from_above in (False, True):
        compiler = Compiler(0, 1, 10**9)
        rows = [2**i for i in range(6)]
        size = largest_fitting(rows, 10**9, Line(0, 1), compiler, 2, from_above)
        assert size == 6
        assert compiler.asked == [32]


def sizes_of(*overrides: str, devices: int = 8) -> Sizes:
    config = load_config(overrides=overrides)
    return Sizes.of(config, BatchPlan.from_config(config, devices))


def test_the_unit_is_one_sample_per_device_or_what_the_shards_allow() -> None:
    plain, tensor = sizes_of(), sizes_of("ici_tensor_parallelism=4")
    name = "per_device_batch_size"
    assert [plain.stated(plain.rows[i])[name] for i in (0, 1, 2)] == [1, 2, 3]
    assert [tensor.stated(tensor.rows[i])[name] for i in (0, 1, 3)] == [0.25, 0.5, 1]


def test_every_size_is_a_batch_that_plans() -> None:
    ramp = (
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=3",
        "per_device_batch_size=8",
    )
    padded = ("global_batch_size=100", "batch_padding=true")
    packed = ("global_batch_size=50", "max_tokens_per_pass=1024")
    pairs = ("use_dpo=true", "dataset_type=jsonl", "dataset_path=pairs.jsonl", *packed)
    schedule = ("batch_size_schedule=0:20 40:70", packed[1], "ici_tensor_parallelism=2")
    pipeline = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=6")
    budgets = (packed, pairs, schedule, (*packed, *pipeline))
    for keys in (ramp, ("global_batch_size=96",), ("ici_tensor_parallelism=2",), padded, *budgets):
        sizes = sizes_of(*keys)
        for rows in sizes.rows[:12]:
            ((name, value),) = sizes.stated(rows).items()
            plan = BatchPlan.from_config(load_config(overrides=[*keys, f"{name}={value}"]), 8)
            assert plan.micro_batch_size_to_train_on == rows
            assert sizes.shape(rows).max_micro_batches == plan.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("... Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.", (17.5, 15.75)),
        (
            "the total memory required for HLO temporaries (500.00G) exceeds available HBM "
            "(95.74G).",
            (500, 95.74),
        ),
    ],
)
def test_the_compiler_s_words_become_bytes(message: str, wanted: tuple[float, float]) -> None:
    assert shortage_in(message) == ("hbm", *(round(gib * 2**30) for gib in wanted))


ONE_DEVICE = MeshShape(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 1))


def way(policy: str, rows: int, seconds: float | None, batch: int = 64) -> Choice:
    verdict, parts = Verdict(True, 1, 1, None, 0.0), Parts(0, 0, 0, 0, 0)
    shape, modelled = BatchShape(rows, -(-batch // rows)), Modelled(modelled_step_s=seconds)
    stated = {"per_device_batch_size": rows}
    return Choice(policy, ONE_DEVICE, shape, stated, verdict, None, parts, modelled, batch)


def test_ways_to_a_batch_are_ranked_by_the_modelled_step() -> None:
    timed = [way("none", 16, 3.0), way("minimal", 8, 1.0), way("full", 64, 2.0)]
    assert [one.remat_policy for one in sorted(timed, key=lambda one: one.rank)] == [
        "minimal",
        "full",
        "none",
    ]
    without_clock = [way("full", 16, None), way("none", 8, None), way("minimal", 16, None)]
    ranked = sorted(without_clock, key=lambda one: one.rank)
    assert [one.remat_policy for one in ranked] == ["minimal", "full", "none"], (
        "the larger, then the least recomputation"
    )


def test_rows_of_padding_are_no_samples_of_a_way() -> None:
    whole, padded = way("full", 8, 1.0), way("none", 12, 0.9, batch=16)
    assert (padded.padded_share, padded.to_dict()["global_batch_size_to_train_on"]) == (1 / 3, 16)
    assert (whole.padded_share, whole.to_dict()["padded_share"]) == (0, 0)
    assert sorted([padded, way("full", 8, 0.95, batch=16)], key=lambda one: one.rank)[0] is padded


def test_rates_of_a_padded_update_count_its_samples_alone() -> None:
    modelled = Modelled(
        modelled_step_s=1.0, modelled_tokens_per_second_per_device=90.0, modelled_mfu=0.3
    )
    padded = modelled.of_samples(Update(BatchShape(12, 2), 16).share)
    assert (padded.modelled_step_s, padded.modelled_mfu) == (1.0, pytest.approx(0.2))
    assert padded.modelled_tokens_per_second_per_device == pytest.approx(60)
    assert Modelled().of_samples(0.5) == Modelled()


def test_the_largest_budget_of_a_pass_is_found_as_the_largest_batch_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load_config(overrides=["max_tokens_per_pass=256", "global_batch_size=100"])
    sizes = Sizes.of(config, BatchPlan.from_config(config, 8))
    compiler = Compiler(1_000, 7, 1_500)
    target: Any = SimpleNamespace(
        name="a machine", devices=[SimpleNamespace(platform="cpu")], memory_source="its chip"
    )
    asked: dict[BatchShape, Any] = {}

    def ask(*shapes: BatchShape) -> list[Verdict]:
        said = [compiler.says(shape.micro_batch) for shape in shapes]
        verdicts = [Verdict(one.fits, one.needed_bytes or 0, 1_500, None, 0.0) for one in said]
        for shape in shapes:
            asked[shape] = SimpleNamespace(modelled=Modelled())
        return verdicts

    oracle: Any = SimpleNamespace(
        config=config,
        mesh=ONE_DEVICE,
        target=SimpleNamespace(**vars(target), memory_bytes=1_500),
        asked=asked,
        ask=ask,
        estimate=lambda: Line(900, 9),
        parts=lambda *_: Parts(0, 0, 0, 0, 0),
    )
    choice = choose(oracle, sizes, 1)
    assert choice is not None and choice.next_verdict is not None
    # 64 rows of 256 tokens on 8 devices, in which a row a sample takes two passes
    assert choice.shape == BatchShape(64, 2) and not choice.next_verdict.fits
    wanted = Wanted(config, target, False)
    assert choice.keys(wanted)["max_tokens_per_pass"] == 8 * 256
    figures = choice.to_dict()
    assert (figures["per_device_batch_size"], figures["padded_share"]) == (None, None)
    show([choice], wanted, [])
    assert "max_tokens_per_pass=2048 is the largest that fits a machine" in capsys.readouterr().out


def test_survive_shows_what_every_smaller_machine_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines: list[Any] = [
        SimpleNamespace(
            name=f"{slices} slices",
            devices=list(range(4 * slices)),
            num_hosts=slices,
            memory_bytes=1,
        )
        for slices in (4, 3, 2, 1)
    ]
    found = {
        "4 slices": [way("none", 16, 1.0, 16)],
        "3 slices": [way("minimal", 24, 1.5, 16)],
        "1 slices": [],
    }

    def search(config: Config, target: Any, *_: object) -> Any:
        if target.name not in found:
            raise ConfigError("fsdp: does not divide")
        choices = found[target.name]
        return SimpleNamespace(
            wanted=Wanted(config, target, False), ways=[], choices=choices, skipped=[]
        )

    command = "maxbatch.commands.fit"
    monkeypatch.setattr(f"{command}.config_and_target", lambda args: (config_of(args), machines[0]))
    monkeypatch.setattr(
        "maxbatch.commands.targets.find_target", lambda topology, slices: machines[4 - slices]
    )
    monkeypatch.setattr(f"{command}._search", search)
    monkeypatch.setattr(f"{command}._too_large", lambda ways, target: "not even 1 row fits")
    monkeypatch.setattr("maxbatch.around.fit.view.has_clock", lambda target: True)
    for target in machines:
        target.memory_source = "its chip"
    arguments = [
        "fit",
        *TINY_RUN,
        "global_batch_size=16",
        "--topology",
        "v5e:2x2",
        "--slices",
        "4",
        "--survive",
    ]
    assert main([*arguments, "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["survive"]
    assert [
        (row["slices"], row["devices"], row["refusal"], row.get("remat_policy")) for row in rows
    ] == [
        (4, 16, None, "none"),
        (3, 12, None, "minimal"),
        (2, 8, "fsdp: does not divide", None),
        (1, 4, "not even 1 row fits", None),
    ]
    assert (rows[1]["padded_share"], rows[1]["modelled_step_s"]) == (1 / 3, 1.5)
    assert main([*arguments, "3"]) == 0
    out = capsys.readouterr().out
    assert "per_device_batch_size=24 remat_policy=minimal" in out and "33.33%" in out
    assert "refused on 2 slices: fsdp: does not divide" in out
    assert main([*arguments, "4"]) == 2
    assert "--survive 4: must be less than the 4 slices" in capsys.readouterr().err
    assert main([*arguments, "3", "--write", "run.yml"]) == 2
    assert "--write run.yml: must not be given beside --survive" in capsys.readouterr().err


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """Every CPU device has 3 MB."""
    small = 3_000_000

    def target(topology: str | None, num_slices: int = 1) -> Target:
        return dataclasses.replace(here(), memory_bytes=small)

    monkeypatch.setattr("maxbatch.commands.targets.find_target", target)
    return small


def fit(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["fit", *TINY_RUN, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.runs
def test_its_answer_fits_by_kind_and_is_kept(
    small_memory: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cache = f"data_cache_dir={tmp_path / 'cache'}"
    answer = fit(capsys, cache, "--write", "fitted.yml")
    assert answer["hbm_bytes_available"] == small_memory
    assert answer["hbm_bytes_needed"] <= small_memory < answer["next_size"]["hbm_bytes_needed"]
    assert answer["next_size"]["fits"] is False
    assert sum(answer["memory"].values()) == answer["hbm_bytes_needed"]
    state = 4 * 26_592 // len(jax.devices())
    assert answer["memory"]["parameters_bytes"] >= state
    assert answer["memory"]["optimizer_bytes"] >= 2 * answer["memory"]["parameters_bytes"]
    assert not any(asked["cached"] for asked in answer["asked"])

    written = load_config("fitted.yml")
    assert written.per_device_batch_size == answer["per_device_batch_size"]
    again = fit(capsys, cache)
    assert all(asked["cached"] for asked in again["asked"])
    assert again["per_device_batch_size"] == answer["per_device_batch_size"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "nowhere/fitted.yml",
            "--write nowhere/fitted.yml: nowhere is not a folder; works: --write fitted.yml",
        ),
        (".", "config file .: is a folder, not a YAML file"),
        ("latin.yml", "config file latin.yml: is not UTF-8 text (byte 12)"),
    ],
)
def test_a_file_that_cannot_take_the_choice_is_refused_before_compiling(
    path: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxbatch.commands.fit._ways", None)
    Path("latin.yml").write_bytes(b"steps: 7  # \xe9t\xe9\n")
    assert main(["fit", *TINY_RUN, "--write", path]) == 2
    assert capsys.readouterr().err == f"maxbatch: error: {said}\n"


@pytest.mark.runs
def test_a_wanted_batch_is_reached_by_every_policy(
    small_memory: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yml").write_text("steps: 7  # few\nper_device_batch_size: 2   # to be fitted\n")
    answer = fit(capsys, "global_batch_size=64", "--write", "run.yml")
    assert {way["remat_policy"] for way in answer["alternatives"]} == {"none", "minimal", "full"}
    assert {way["global_batch_size_to_train_on"] for way in answer["alternatives"]} == {64}
    written = load_config("run.yml")
    assert written.per_device_batch_size == answer["per_device_batch_size"]
    assert (written.steps, written.remat_policy) == (7, answer["remat_policy"])


@pytest.mark.runs
def test_a_policy_that_is_stated_is_tried_beside_the_others(
    small_memory: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yml").write_text("remat_policy: custom\nquery_proj: device\n")
    answer = fit(capsys, "run.yml", "global_batch_size=64", "--write", "run.yml")
    assert {way["remat_policy"] for way in answer["alternatives"]} == {
        "none",
        "minimal",
        "full",
        "custom",
    }
    assert load_config("run.yml").remat_policy == answer["remat_policy"]


@pytest.mark.runs
def test_any_mesh_is_answered_with_keys_to_copy(
    small_memory: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = (
        f"data_cache_dir={tmp_path / 'cache'}",
        "ici_data_parallelism=1",
        "base_num_decoder_layers=1",
    )
    answer = fit(capsys, "--mesh", "auto", *keys, "--write", "fitted.yml")
    devices = len(jax.devices())
    meshes = {way["mesh"] for way in answer["asked"]}
    assert meshes == {
        f"ici_fsdp_parallelism={devices}",
        f"ici_fsdp_parallelism={devices // 2} ici_tensor_parallelism=2",
    }
    assert answer["no_time_for"] == []
    largest = max(way["per_device_batch_size"] for way in answer["alternatives"])
    assert answer["per_device_batch_size"] == largest
    assert answer["ranked_by"] == "micro_batch_size_to_train_on"

    axes = {axis: answer[f"ici_{axis}_parallelism"] for axis in AXES}
    copied = load_config(overrides=[*TINY_RUN, *keys, *answer["mesh"].split()])
    for config in (copied, load_config("fitted.yml")):
        assert MeshShape.from_config(config.plan, devices).sizes == axes


@pytest.mark.runs
def test_a_batch_smaller_than_the_devices_gets_a_mesh_that_holds_it(
    small_memory: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("maxbatch.around.fit.choices.POLICIES", ("full",))
    half = len(jax.devices()) // 2
    stated = (
        f"global_batch_size={half}",
        "ici_data_parallelism=1",
        "remat_policy=full",
        f"data_cache_dir={tmp_path / 'cache'}",
    )
    assert main(["fit", *TINY_RUN, *stated]) == 2
    capsys.readouterr()
    answer = fit(capsys, *stated, "--mesh", "auto")
    assert answer["global_batch_size_to_train_on"] == half and answer["ici_tensor_parallelism"] == 2


@pytest.mark.runs
def test_where_nothing_fits_it_says_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "maxbatch.commands.targets.find_target",
        lambda *_: dataclasses.replace(here(), memory_bytes=1000),
    )
    assert main(["fit", *TINY_RUN]) == 1
    error = capsys.readouterr().err
    assert "not even per_device_batch_size=1 fits" in error and "remat_policy=full" in error


def test_it_says_that_a_cpu_has_the_host_s_memory() -> None:
    target = here()
    assert target.memory_bytes and "host" in target.memory_source
    assert device_facts(target.devices)["devices"] == len(jax.devices())
