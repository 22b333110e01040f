"""Reinforcement learning keeps the promises of the batch: chunks, devices and resumes do not show
in the update.
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import maxbatch
from maxbatch.cli import main
from maxbatch.kinds.prompt import warm_start
from maxbatch.run.folder.devices import read_devices
from maxbatch.run.folder.sessions import read_sessions
from tests.helpers.command import Hold, recorded, start
from tests.helpers.policies import GROUP, KEYS, RL, reward_file, train
from tests.helpers.processes import wait_for
from tests.helpers.slices import TWO_SLICES, pretend_slices
from tests.helpers.tiny import UNSAVED, assert_same_run, read_metrics

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One device, no chunks."""
    return train(tmp_path_factory.mktemp("reference") / "run", UNSAVED)


def assert_same_updates(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    close = ("loss", "grad_norm", "reward", "entropy", "response_length")
    assert_same_run(records, expected, ("step", "samples_seen", "data_fingerprint"), close)


@pytest.mark.parametrize(
    ("devices", "micro_batch_size", "sampling"),
    [  # small chunks on one device: `test_chunks_of_sampling_and_of_training_need_not_be_the_same`
        (2, 2 * GROUP, ()),
        (4, -1, ("rollout_tensor_parallelism=2",)),
        (4, GROUP, ("rollout_data_parallelism=1", "ici_data_parallelism=2")),
    ],
)
def test_chunks_and_devices_give_the_same_responses_and_losses(
    devices: int,
    micro_batch_size: int,
    sampling: tuple[str, ...],
    reference: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    records = train(
        tmp_path / "run",
        f"micro_batch_size={micro_batch_size}",
        *sampling,
        UNSAVED,
        devices=devices,
    )
    assert_same_updates(records, reference)


EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=24",
    "routed_bias=true",
    "routed_bias_update_rate=0.01",
    "steps=null",
    "train_samples=11",
    UNSAVED,
)


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One device, no chunks, 11 prompts."""
    return train(tmp_path_factory.mktemp("experts") / "run", *EXPERTS)


def test_chunks_and_devices_send_the_same_tokens_to_experts(
    of_experts: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Prompts and responses count, the rows that fill the last chunk do not; the bias takes one
    step an update.
    """
    axes = ("ici_expert_parallelism=2", "rollout_tensor_parallelism=2")
    cut = train(tmp_path / "cut", *EXPERTS, "micro_batch_size=8", *axes, devices=2)
    assert_same_updates(cut, of_experts)
    same = ("expert_load_max", "routing_fingerprint")
    assert {name: cut[0][name] for name in same} == {name: of_experts[0][name] for name in same}


def test_a_length_in_prompts_is_met_exactly(of_experts: list[dict[str, Any]]) -> None:
    assert [record["samples_seen"] for record in of_experts] == [8, 11]
    assert [record["global_batch_size"] for record in of_experts] == [8 * GROUP, 3 * GROUP]


@pytest.mark.usefixtures("standard_promotion")
def test_float32_samples_the_same_responses_on_any_devices_where_training_rounds_to_bfloat16(
    tmp_path: Path,
) -> None:
    """Parameters that stay as they are, so that all that may differ is how the programs round."""
    types = ("dtype=bfloat16", "sampler_dtype=float32")
    keys = (*types, "learning_rate=1e-12", "max_target_length=40", "steps=2", UNSAVED)
    whole = train(tmp_path / "whole", *keys)
    found = train(
        tmp_path / "cut", *keys, "ici_data_parallelism=2", "micro_batch_size=8", devices=4
    )
    assert_same_run(found, whole, ("data_fingerprint", "reward", "response_length"), ())


@pytest.mark.usefixtures("standard_promotion")
def test_the_ratio_is_to_the_policy_that_sampled_in_its_own_type(tmp_path: Path) -> None:
    """Log-probabilities of float32 for training in bfloat16: apart by its rounding, on policy as
    well.
    """
    keys = (
        "dtype=bfloat16",
        "sampler_dtype=float32",
        "learning_rate_schedule=constant",
        "steps=1",
        UNSAVED,
    )
    own, other = (
        train(tmp_path / name, *keys, f"sampler_dtype={name}")[0]
        for name in ("bfloat16", "float32")
    )
    assert own["old_policy_kl"] < 1e-6 < other["old_policy_kl"] < 1e-2


def test_the_first_update_is_on_policy_in_eight_bits(tmp_path: Path) -> None:
    keys = ("quantization=int8", "learning_rate_schedule=constant", "steps=1", UNSAVED)
    (first,) = train(tmp_path / "run", *keys)
    assert first["old_policy_kl"] < 1e-6 and first["grad_norm"] > 0


def test_adapters_are_sampled_from_beside_matrices_in_eight_bits(tmp_path: Path) -> None:
    train(tmp_path / "base", "steps=1")
    keys = (
        "quantization=int8",
        "lora_rank=2",
        f"load_parameters_path={tmp_path / 'base'}",
        "learning_rate=0.05",
        "learning_rate_schedule=constant",
        "warmup_steps_fraction=0",
        "steps=2",
        UNSAVED,
    )
    records = train(tmp_path / "run", *keys)
    assert all(record["old_policy_kl"] < 1e-6 and record["grad_norm"] > 0 for record in records)


def test_two_meshes_side_by_side_give_the_same_updates(
    reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    apart = (
        "trainer_devices_fraction=0.5",
        "sampler_devices_fraction=0.5",
        "micro_batch_size=8",
        "rollout_tensor_parallelism=2",
        UNSAVED,
    )
    records = train(tmp_path / "run", *apart, devices=4)
    assert_same_updates(records, reference)
    assert all(0 <= record["busy_fraction/both"] <= 1 for record in records)
    (used,) = read_devices(tmp_path / "run")
    assert used.num_devices == 4 and math.prod(used.mesh.values()) == 2, "two of the four train"


def test_chunks_of_sampling_and_of_training_need_not_be_the_same(
    reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    records = train(
        tmp_path / "run", "train_micro_batch_size=4", "rollout_micro_batch_size=2", UNSAVED
    )
    assert_same_updates(records, reference)


def test_several_slices_are_planned_as_the_mesh_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_slices(monkeypatch, 4)
    records = train(tmp_path / "run", *TWO_SLICES, "steps=1", UNSAVED, devices=8)
    assert records[0]["samples_seen"] == 8


def test_a_batch_serves_its_iterations_and_a_resume_between_batches_changes_nothing(
    tmp_path: Path,
) -> None:
    keys = (
        "num_iterations=2",
        "grpo_beta=0.1",
        "micro_batch_size=16",
        "learning_rate_schedule=constant",
    )
    whole = train(tmp_path / "whole", *keys, "steps=6", UNSAVED)
    train(tmp_path / "parts", *keys, "steps=2")
    parts = train(tmp_path / "parts", *keys, "steps=6")
    assert [record["samples_seen"] for record in whole] == [0, 8, 8, 16, 16, 24]
    assert (
        whole[0]["data_fingerprint"] == whole[1]["data_fingerprint"] != whole[2]["data_fingerprint"]
    )
    assert whole[0]["kl"] < 1e-6 < whole[-1]["kl"], (
        "measured from the first parameters, also after the resume"
    )
    assert_same_updates(parts, whole)


def test_asked_to_stop_it_saves_and_exits_with_75_and_killed_with_9_it_goes_on_as_if_neither_had_been(
    reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_dir, hold = tmp_path / "run", Hold(1, tmp_path)
    keys = (
        RL,
        *KEYS,
        reward_file(tmp_path),
        "checkpoint_period=2",
        "micro_batch_size=16",
        f"run_dir={run_dir}",
    )
    stopped = start("rl", *keys, **hold.variables)
    wait_for(lambda: recorded(run_dir) >= 1, stopped)
    stopped.send_signal(signal.SIGTERM)
    hold.release()
    stopped.communicate(timeout=600)
    assert stopped.returncode == 75
    assert saved_steps(run_dir) == [read_metrics(run_dir)[-1]["step"]] == [1]
    killed = start("rl", *keys, **Hold(2, tmp_path).variables)
    wait_for(lambda: recorded(run_dir) >= 2, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert saved_steps(run_dir) == [1], "the second update is recorded and not saved"
    assert_same_updates(train(run_dir, "checkpoint_period=2"), reference)


def test_asked_to_stop_before_its_warm_start_it_saves_that_and_exits_with_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = warm_start.worked_examples

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return make(*arguments)

    monkeypatch.setattr(warm_start, "worked_examples", interrupted)
    keys = (RL, *KEYS, "warm_start_steps=5", "steps=1", f"run_dir={tmp_path / 'run'}")
    assert main(["rl", *keys]) == 75
    assert saved_steps(tmp_path / "run" / "warm_start") == [0]
    for folder in ("run", "run/warm_start"):
        assert [session.ended_by for session in read_sessions(tmp_path / folder)] == ["SIGTERM"]
    assert main(["rl", *keys]) == 0


def test_adapters_learn_from_rewards_on_any_devices_and_resume(tmp_path: Path) -> None:
    base = tmp_path / "base"
    train(base, "steps=1")
    keys = (
        f"load_parameters_path={base}",
        "lora_rank=2",
        "grpo_beta=0.1",
        "micro_batch_size=16",
        "learning_rate_schedule=constant",
    )
    whole = train(tmp_path / "whole", *keys, "steps=3", UNSAVED)
    assert (
        whole[0]["grad_norm"] > 0
        and whole[0]["kl"] == pytest.approx(0, abs=1e-6)
        and whole[2]["kl"] > 1e-7
    )
    train(tmp_path / "cut", *keys, "steps=2", devices=2)
    assert_same_updates(train(tmp_path / "cut", *keys, "steps=3"), whole)
    model = maxbatch.load_model(tmp_path / "cut")
    assert np.isfinite(model.score(["1+1=2"]).loss)


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(
        int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit()
    )


def test_the_warm_start_and_the_evals_leave_what_they_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (
        "warm_start_steps=2",
        "eval_interval=1",
        "eval_steps=1",
        "eval_num_generations=2",
        "steps=2",
    )
    records = train(tmp_path / "run", *keys, "profile_steps=2:3")
    assert any((tmp_path / "run/profile").rglob("*.xplane.pb"))
    assert len(read_metrics(tmp_path / "run/warm_start")) == 2
    assert (
        "warm start: 2 updates on worked examples, before reinforcement learning\n"
        in capsys.readouterr().out
    )
    names = {"eval_greedy_pass_at_1", "eval_pass_at_1", "eval_pass_at_2"}
    assert all(names <= record.keys() for record in records)
    assert {f"first_{name}" for name in names} <= records[0].keys()
    lines = [
        json.loads(line) for line in (tmp_path / "run/transcripts.jsonl").read_text().splitlines()
    ]
    assert {"prompt", "response", "greedy", "passes"} <= lines[-1]["transcripts"][0].keys()


def test_the_responses_that_are_trained_on_are_in_the_transcripts(tmp_path: Path) -> None:
    keys = ("steps=3", "transcript_period=2", "off_policy_steps=1", "eval_interval=-1", UNSAVED)
    records = train(tmp_path / "run", *keys)
    lines = [
        json.loads(line) for line in (tmp_path / "run/transcripts.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["policy_version"]) for line in lines] == [(1, 0), (3, 1)]
    for line, record in zip(lines, records[::2], strict=True):
        trained = line["trained"]
        groups = [trained[i : i + GROUP] for i in range(0, len(trained), GROUP)]
        assert len(trained) == record["global_batch_size"]
        assert all(
            len({(one["prompt"], one["prompt_index"]) for one in group}) == 1 for group in groups
        )
        assert [group[0]["prompt_index"] for group in groups] == list(
            range(record["samples_seen"] - len(groups), record["samples_seen"])
        )
        assert sum(one["reward"] for one in trained) / len(trained) == pytest.approx(
            record["reward"]
        )
        assert all(
            sum(one["advantage"] for one in group) == pytest.approx(0, abs=1e-4) for group in groups
        )
        assert all(isinstance(one["response"], str) and one["rewards"] for one in trained)


def test_evals_do_not_depend_on_chunks(tmp_path: Path) -> None:
    keys = ("eval_interval=1", "eval_steps=1", "eval_num_generations=2", "steps=1", UNSAVED)
    found = {
        chunk: train(tmp_path / f"run{chunk}", *keys, f"micro_batch_size={chunk}")[0]
        for chunk in (-1, GROUP)
    }
    for name in ("eval_greedy_pass_at_1", "first_eval_pass_at_1", "eval_pass_at_2"):
        assert found[-1][name] == pytest.approx(found[GROUP][name], abs=1e-9)
    texts = [(tmp_path / f"run{chunk}" / "transcripts.jsonl").read_text() for chunk in found]
    assert texts[0] == texts[1]


def test_a_warm_start_that_has_no_documents_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    keys = [
        "dataset_type=jsonl",
        f"dataset_path={tmp_path / 'p.jsonl'}",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert main(["rl", *keys, "warm_start_steps=5", "eval_fraction=0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "works: warm_start_steps=0" in error


def test_rewards_have_weights_and_names_and_may_fail(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "def bad(prompt, response, record):\n    raise ValueError('no')\n"
    )
    path = reward_file(tmp_path).removeprefix("reward=").removesuffix(":digits")
    keys = (f"reward={path}:digits,2;{path}:is_long,1", "steps=1", UNSAVED)
    (record,) = train(tmp_path / "two", *keys)
    assert record["reward"] == pytest.approx(
        2 * record["reward/digits"] + record["reward/is_long"], rel=1e-5
    )
    (record,) = train(tmp_path / "failing", f"reward={tmp_path}/bad.py:bad", "steps=1", UNSAVED)
    assert (
        record["rewards_failed"] == 8 * GROUP
        and record["reward"] == 0
        and record["groups_without_signal"] == 1
    )
