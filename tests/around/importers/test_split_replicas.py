"""`maxbatch import` of runs whose model is split over devices: a replica's rows are on all of its
devices.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from maxbatch import BatchPlan, RampupBatchManager, load_config
from maxbatch.around.importers.translation import SPLIT_AXES, Translation
from maxbatch.around.words import rows
from maxbatch.cli import main
from maxbatch.commands.import_config import FORMATS
from maxbatch.system.errors import ConfigError
from tests.helpers.imports import imported
from tests.programs.replicas import fault, random_case

MEGATRON = "python pretrain_gpt.py --train-iters 10 --seq-length 512 --lr 1e-4 "
AXOLOTL = """
base_model: models/small
datasets:
  - path: a.jsonl
    type: completion
sequence_len: 2048
max_steps: 100
"""


def batch_of(name: str, path: Path, text: str, devices: int) -> int:
    config, _ = imported(name, path, text)
    return BatchPlan.from_config(config, devices).global_batch_size_to_train_on


@pytest.mark.parametrize(
    ("flags", "devices", "batch"),
    [
        ("--micro-batch-size 2 --pipeline-model-parallel-size 2", 8, 8),
        (
            "--micro-batch-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            8,
            8,
        ),
        (
            "--micro-batch-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--context-parallel-size 2",
            16,
            8,
        ),
        ("--micro-batch-size 3 --tensor-model-parallel-size 2", 4, 6),
        ("--micro-batch-size 1 --pipeline-model-parallel-size 4 --global-batch-size 64", 8, 64),
        ("--micro-batch-size 2 --expert-model-parallel-size 2 --num-experts 4", 4, 8),
    ],
)
def test_megatrons_batch_is_its_replicas_times_their_rows(
    tmp_path: Path, flags: str, devices: int, batch: int
) -> None:
    assert batch_of("megatron", tmp_path / "m.sh", MEGATRON + flags, devices) == batch


@pytest.mark.parametrize(
    ("name", "file", "text", "batch"),
    [
        (
            "axolotl",
            "a.yml",
            f"{AXOLOTL}micro_batch_size: 4\ngradient_accumulation_steps: "
            "2\nsequence_parallel_degree: 4",
            32,
        ),
        (
            "axolotl",
            "a.yml",
            f"{AXOLOTL}micro_batch_size: 4\ntensor_parallel_size: 2\ncontext_parallel_size: 4",
            8,
        ),
        ("axolotl", "a.yml", f"{AXOLOTL}micro_batch_size: 4\ndp_replicate_size: 2", 64),
        (
            "deepspeed",
            "d.json",
            json.dumps(
                {
                    "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": 2,
                    "sequence_parallel_size": 4,
                }
            ),
            32,
        ),
        (
            "deepspeed",
            "d.json",
            json.dumps(
                {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 4}}
            ),
            16,
        ),
        (
            "hf",
            "h.json",
            json.dumps(
                {
                    "per_device_train_batch_size": 4,
                    "parallelism_config": {"tp_size": 2, "cp_size": 2},
                }
            ),
            16,
        ),
        (
            "hf",
            "h.sh",
            "python t.py --per_device_train_batch_size 4 --parallelism-config-sp-size 4",
            16,
        ),
    ],
)
def test_other_batches_are_their_replicas_times_their_rows(
    tmp_path: Path, name: str, file: str, text: str, batch: int
) -> None:
    assert batch_of(name, tmp_path / file, text, 16) == batch


@pytest.mark.parametrize(
    "flags", ["--parallelism-config-cp-size 4", "--config_file accelerate.yaml"]
)
def test_the_launchers_split_of_a_model_divides_its_rows(tmp_path: Path, flags: str) -> None:
    (tmp_path / "accelerate.yaml").write_text(
        "num_processes: 8\nparallelism_config:\n  parallelism_config_tp_size: 2\n  "
        "parallelism_config_cp_size: 2\n"
    )
    text = f"accelerate launch {flags} train.py --per_device_train_batch_size 4 --max_steps 10"
    assert batch_of("hf", tmp_path / "h.sh", text, 16) == 16


def test_every_word_that_splits_a_replica_is_taken_before_the_rows() -> None:
    known = {axis.replace("dcn", "ici") for axis in SPLIT_AXES}
    for name, form in FORMATS.items():
        own = {"hf": ("hf",), "trl": (), "maxtext": ()}.get(
            name, (name, "megatron" if name == "nemo" else name)
        )
        for row in rows():
            if set(row.whose) & set(own) and set(row.keys) & known and row.is_same:
                t = Translation({row.word: "2"}, {}, name)
                form.translate(t, "replica")
                assert t.replica == 2, (name, row.word)


@pytest.mark.parametrize(
    "word", ["tensor_model_parallel_size", "ulysses_parallel_size", "pipeline_parallel_degree"]
)
def test_a_split_by_another_frameworks_name_is_never_left_out(tmp_path: Path, word: str) -> None:
    _, fates = imported("axolotl", tmp_path / "a.yml", f"{AXOLOTL}micro_batch_size: 4\n{word}: 4")
    assert fates[word].is_essential


@pytest.mark.parametrize(
    ("name", "file", "text", "said"),
    [
        (
            "megatron",
            "m.sh",
            f"{MEGATRON}--micro-batch-size 2 --pipeline-model-parallel-size 2",
            "8 devices: 8 samples",
        ),
        (
            "axolotl",
            "a.yml",
            f"{AXOLOTL}micro_batch_size: 4\nsequence_parallel_degree: 4",
            "8 devices: 8 samples",
        ),
        ("deepspeed", "d.json", '{"train_batch_size": 64}', "8 devices: 64 samples"),
        ("hf", "h.json", '{"per_device_train_batch_size": 4}', "8 devices: 32 samples"),
        (
            "maxtext",
            "t.yml",
            "base_config: base.yml\nper_device_batch_size: 2\n",
            "8 devices: 16 samples",
        ),
    ],
)
def test_devices_of_an_import_print_its_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    file: str,
    text: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(text)
    assert main(["import", name, file, "--devices", "8"]) == 0
    assert said in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("micro", "stages", "passes"), [(1, 4, 1), (1, 2, 3), (3, 4, 2)])
def test_a_batch_of_too_few_rows_for_a_pipeline_keeps_its_samples_with_what_works(
    tmp_path: Path, micro: int, stages: int, passes: int
) -> None:
    flags = f"--micro-batch-size {micro} --pipeline-model-parallel-size {stages}"
    imported("megatron", tmp_path / "m.sh", MEGATRON + flags)
    stated = [f"gradient_accumulation_steps={passes}"]
    with pytest.raises(ConfigError) as refusal:
        BatchPlan.from_config(load_config(tmp_path / "imported.yml", overrides=stated), 8)
    works = str(refusal.value).partition("works: ")[2].split()
    assert "batch_padding=true" in works
    padded = load_config(tmp_path / "imported.yml", overrides=[*stated, *works])
    assert (
        BatchPlan.from_config(padded, 8).global_batch_size_to_train_on
        == micro * 8 // stages * passes
    )


def test_random_replicas_of_other_programs_keep_their_batch(tmp_path: Path) -> None:
    rng = random.Random(7)
    cases = [random_case(rng) for _ in range(80)]
    faults = {case.text: found for case in cases if (found := fault(case, tmp_path))}
    assert not faults


def test_megatrons_step_schedule_is_sorted_as_there(tmp_path: Path) -> None:
    text = f"{MEGATRON}--micro-batch-size 1 --step-batch-size-schedule '1T:64, 0:16 500b:32'"
    config, _ = imported("megatron", tmp_path / "m.sh", text)
    manager = RampupBatchManager.from_config(config, 4)
    half, whole = 5 * 10**11 // 512, 10**12 // 512
    assert [manager.batch_size_at(s) for s in (0, half - 1, half, whole - 1, whole)] == [
        16,
        16,
        32,
        32,
        64,
    ]


@pytest.mark.parametrize("schedule", ["1T:64 1T:32 0:8", "10:8 20:16", "0:8 100:16", "x"])
def test_a_step_schedule_that_megatron_refuses_is_refused(tmp_path: Path, schedule: str) -> None:
    text = f"{MEGATRON}--micro-batch-size 1 --step-batch-size-schedule '{schedule}'"
    _, fates = imported("megatron", tmp_path / "m.sh", text)
    assert fates["step_batch_size_schedule"].is_essential
