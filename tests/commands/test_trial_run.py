"""`maxbatch train --try`: a tiny run of a config's form, and all faults of its data in one
message.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.commands.trial_run import make_trial
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.config.paths import configs_dir
from maxbatch.data.stream.stream import open_stream
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import model_size
from maxbatch.plan.batch import BatchPlan
from tests.helpers.tiny import TINY_RUN

PRESETS = sorted(path.stem for path in (configs_dir() / "models").glob("*.yml"))
FORMS = {
    "a constant batch": (),
    "a batch that is stated globally": ("global_batch_size=1024",),
    "a ramp": ("enable_rampup_batch_size=true", "gradient_accumulation_steps=8"),
    "a schedule": ("batch_size_schedule=0:256 100K:512",),
    "stages": (
        "ici_pipeline_parallelism=4",
        "num_pipeline_microbatches=8",
        "num_pipeline_repeats=2",
    ),
    "every axis": (
        "dcn_data_parallelism=-1",
        "ici_tensor_parallelism=4",
        "ici_context_parallelism=2",
    ),
    "experts": ("model_name=mixtral-8x7b", "ici_expert_parallelism=8"),
}


def trial_config(config: Config) -> tuple[Config, int]:
    trial = make_trial(config)
    return trial.config("run"), trial.num_devices


@pytest.mark.parametrize("preset", PRESETS)
def test_a_trial_has_the_family_of_the_model_and_none_of_its_size(preset: str) -> None:
    config = load_config(model_name=preset)
    tiny, num_devices = trial_config(config)
    assert tiny.decoder_block == config.decoder_block and tiny.decoder_block in FAMILIES
    for key in (
        "attention_type",
        "mlp_activations",
        "rope_type",
        "use_qk_norm",
        "attention_bias",
        "dtype",
        "opt_type",
    ):
        assert tiny[key] == config[key], key
    assert (tiny.num_experts > 1) == (config.num_experts > 1)
    assert model_size(tiny.model) < 1_000_000
    assert (tiny.tokenizer_type, tiny.dataset_type, num_devices) == ("byte", "synthetic", 2)


@pytest.mark.parametrize("form", FORMS)
def test_a_trial_keeps_the_axes_and_the_form_of_the_batch(form: str) -> None:
    config = load_config(None, FORMS[form])
    tiny, num_devices = trial_config(config)
    plan = BatchPlan.from_config(tiny, num_devices)
    assert plan.total_steps == 4 and plan.global_batch_size_to_train_on <= 64
    assert len(plan.stages) == (2 if form in ("a ramp", "a schedule") else 1)
    assert (plan.gradient_accumulation_steps > 1) == (
        form in ("a batch that is stated globally", "a ramp", "a schedule")
    )
    assert (tiny.ici_pipeline_parallelism > 1) == (
        form == "stages"
    ) and tiny.num_pipeline_repeats == (2 if form == "stages" else 1)
    assert num_devices == {"stages": 4, "every axis": 16, "experts": 4}.get(form, 2)
    assert (tiny.ici_expert_parallelism > 1) == (form == "experts")


@pytest.mark.parametrize("kind", ["use_sft=true", "use_dpo=true"])
def test_a_trial_of_records_with_answers_is_one_of_texts(kind: str) -> None:
    tiny, _ = trial_config(
        load_config(None, [kind, "dataset_type=jsonl", "dataset_path=records.jsonl"])
    )
    assert len(open_stream(tiny)) > 0 and not (tiny.use_sft or tiny.use_dpo)


def test_no_variable_of_the_environment_reaches_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_trial(load_config())
    for name, text in (
        ("RUN_DIR", "runs/real"),
        ("TRAIN_TOKENS", "1B"),
        ("GLOBAL_BATCH_SIZE", "512"),
    ):
        monkeypatch.setenv(f"MAXBATCH_{name}", text)
    config = trial.config("run")
    assert (config.run_dir, config.steps, config.train_tokens, config.global_batch_size) == (
        "run",
        4,
        None,
        None,
    )


@pytest.mark.runs
def test_train_try_reports_all_faults_of_data_and_tokenizer_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # they are there
    monkeypatch.setattr("maxbatch.commands.arguments.make_cpu_devices", lambda number: None)
    (tmp_path / "run.yml").write_text("\n".join(pair.replace("=", ": ", 1) for pair in TINY_RUN))
    wrong = (
        "dataset_type=jsonl",
        "dataset_path=none.jsonl",
        "eval_dataset_path=nothing.jsonl",
        "run_dir=runs/real",
        "tokenizer_type=huggingface",
        "tokenizer_path=/none/tokenizer.json",
        "load_parameters_path=/none/run",
    )
    assert main(["train", "run.yml", *wrong, "--try"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    for said in (
        "eval_dataset_path='nothing.jsonl'",
        "tokenizer_path='/none/tokenizer.json'",
        "/none/run: no such folder",
    ):
        assert said in printed.err
    assert "trying llama2: 2 layers of width 64, mesh fsdp 2 on 2 CPU devices" in printed.out
    assert "4 updates, loss " in printed.out and not Path("runs").exists()
    assert main(["train", "run.yml", "--try", "--simulate-devices", "2"]) == 2
    assert "beside --try" in capsys.readouterr().err
