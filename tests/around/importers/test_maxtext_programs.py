"""`maxbatch import maxtext`: commands without a YAML, MaxText's own base.yml, and models that go
before their files.

Values are those of MaxText 0.2.5.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from maxbatch import ConfigError, load_config
from maxbatch.around.importers import maxtext_defaults
from maxbatch.around.importers.maxtext_defaults import file_of_module, values_of
from maxbatch.around.importers.shell import commands_of
from maxbatch.around.importers.table import sections, settings
from maxbatch.commands.import_config import translated, written
from tests.helpers.imports import imported
from tests.programs.maxtext_commands import bash_commands, differences

TRAINERS = "maxtext.trainers.post_train"
NAMED = "model_name=llama3.1-8b base_output_directory=runs run_name=a"


def table(section: str) -> str:
    """Returns a section of the table of defaults as YAML."""
    text = Path(maxtext_defaults.__file__).with_suffix(".txt").read_text()
    words = settings(dict(sections(text))[section])
    return "".join(
        f"{word}: {value if value.startswith('[') else json.dumps(value)}\n"
        for word, value in words.items()
    )


@pytest.mark.parametrize(
    "start",
    [
        "python3 -m {0}.sft.train_sft",
        "python3 src/maxtext/trainers/post_train/sft/train_sft.py",
        "python -m {0}.sft.train_sft_native",
        "JAX_PLATFORMS=proxy python3 -m {0}.sft.train_sft /nowhere/configs/post_train//sft.yml",
        "python3 -m src.{0}.sft.train_sft",
    ],
)
def test_a_program_without_a_yaml_reads_the_file_of_its_module(tmp_path: Path, start: str) -> None:
    config, _ = imported(
        "maxtext",
        tmp_path / "run.sh",
        f"{start.format(TRAINERS)} {NAMED} per_device_batch_size=1\n",
    )
    assert (config.use_sft, config.sft_train_on_completion_only, config.learning_rate) == (
        True,
        True,
        2e-5,
    )
    assert (
        config.dataset_path.startswith("HuggingFaceH4/ultrachat_200k")
        and config.tokenizer_type == "huggingface"
    )


def test_pairs_prompts_and_teachers_are_those_of_their_programs(tmp_path: Path) -> None:
    line = (
        f"python3 -m {TRAINERS}.dpo.train_dpo {NAMED} eval_interval=0 "
        "train_data_columns=\"['chosen', 'rejected']\"\n"
    )
    config, _ = imported("maxtext", tmp_path / "dpo.sh", line)
    assert (config.use_dpo, config.learning_rate, config.per_device_batch_size) == (True, 5e-7, 2)
    assert (config.model_name, config.eval_interval, config.steps) == ("llama3.1-8b", -1, 10)
    line = (
        f"python3 -m {TRAINERS}.rl.train_rl {NAMED} num_generations=8 batch_size=4 "
        "loss_algo=gspo-token\n"
    )
    config, _ = imported("maxtext", tmp_path / "rl.sh", line)
    assert (config.batch_size, config.num_generations, config.loss_algo) == (4, 8, "gspo-token")
    assert (config.learning_rate, config.adam_b2, config.grpo_beta) == (3e-6, 0.99, 0.08)
    (tmp_path / "distil.sh").write_text(
        f"python3 -m {TRAINERS}.distillation.train_distill {NAMED}\n"
    )
    fates, _ = translated("maxtext", tmp_path / "distil.sh")
    assert (
        "no distillation"
        in {fate.word: fate.says for fate in fates.fates}["teacher_overrides.model_name"]
    )


def test_every_module_of_maxtexts_mapping_has_the_values_of_its_file() -> None:
    for module in (
        "pre_train.train",
        "pre_train.train_compile",
        "post_train.sft.train_sft",
        "post_train.dpo.train_dpo",
        "post_train.rl.train_rl",
        "post_train.distillation.train_distill",
    ):
        file = file_of_module(f"maxtext.trainers.{module}")
        assert values_of(file) is not None and ("post_train" in module) == (file != "base.yml")
    assert file_of_module("maxtext.trainers.another") == "base.yml"  # as there


def test_sft_over_base_yml_trains_on_all_tokens_as_there(tmp_path: Path) -> None:
    text = (
        "base_config: base.yml\ndataset_type: hf\nhf_path: a/b\ntrain_data_columns: "
        "[messages]\nuse_sft: true\n"
    )
    assert not imported("maxtext", tmp_path / "m.yml", text)[0].sft_train_on_completion_only


@pytest.mark.parametrize("model", ["", "model_name: gemma2-2b\n", "model_name: mixtral-8x7b\n"])
def test_maxtexts_own_base_yml_is_as_if_nothing_were_stated(tmp_path: Path, model: str) -> None:
    text = table("base.yml").replace('model_name: "default"\n', "")
    config, fates = imported("maxtext", tmp_path / "base.yml", text + model)
    assert all(fate.fate != "not supported" for fate in fates.values()) and len(fates) > 700
    unstated, _ = imported("maxtext", tmp_path / "m.yml", f"dataset_type: synthetic\n{model}")
    same = (
        "model_name",
        "base_emb_dim",
        "base_num_decoder_layers",
        "vocab_size",
        "attention_type",
        "num_experts",
        "learning_rate",
        "steps",
        "per_device_batch_size",
        "dtype",
        "remat_policy",
        "packing",
    )
    assert {name: config[name] for name in same} == {name: unstated[name] for name in same}
    with pytest.raises(ConfigError, match="routed_score_func"):
        imported_strictly(
            tmp_path / "base.yml",
            text.replace('routed_score_func: ""\n', "routed_score_func: topk\n"),
        )


def imported_strictly(path: Path, text: str) -> None:
    path.write_text(text)
    fates = translated("maxtext", path)[0].fates
    if refused := [fate.word for fate in fates if fate.fate == "not supported"]:
        raise ConfigError(f"not supported: {refused}")


def test_an_edited_base_yml_counts_where_it_is_read(tmp_path: Path) -> None:
    base = tmp_path / "my" / "base.yml"
    base.parent.mkdir()
    base.write_text("learning_rate: 7.e-5\nsteps: 150_001\nopt_type: adamw\n")
    line = f"python3 -m maxtext.trainers.pre_train.train {base} run_name=a dataset_type=synthetic\n"
    assert imported("maxtext", tmp_path / "run.sh", line)[0].learning_rate == 7e-5
    (base.parent / "m.yml").write_text("base_config: base.yml\ndataset_type: synthetic\nsteps: 3\n")
    line = f"python3 -m maxtext.trainers.pre_train.train {base.parent / 'm.yml'} run_name=a\n"
    config, _ = imported("maxtext", tmp_path / "run.sh", line)
    assert (config.learning_rate, config.steps) == (7e-5, 3)


def test_a_models_own_keys_go_before_those_of_a_config_and_not_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "m.yml").write_text(
        "model_name: llama3.1-8b\nbase_num_decoder_layers: 2\ndataset_type: synthetic\n"
    )
    fates = {fate.word: fate for fate in translated("maxtext", tmp_path / "m.yml")[0].fates}
    assert fates["base_num_decoder_layers"].fate == "ignored"
    line = "python3 -m maxtext.trainers.pre_train.train m.yml override_model_config=true"
    config, _ = imported("maxtext", tmp_path / "run.sh", line)
    assert config.base_num_decoder_layers == 32
    config, _ = imported("maxtext", tmp_path / "run.sh", f"{line} base_num_decoder_layers=3")
    assert config.base_num_decoder_layers == 3


def test_a_model_named_after_an_import_displaces_the_imported_one(tmp_path: Path) -> None:
    line = (
        f"python3 -m {TRAINERS}.sft.train_sft base_output_directory=runs run_name=a num_experts=1\n"
    )
    (tmp_path / "run.sh").write_text(line)
    (tmp_path / "o.yml").write_text(written(translated("maxtext", tmp_path / "run.sh")[0], "x"))
    assert load_config(tmp_path / "o.yml").base_emb_dim == 2048
    config = load_config(tmp_path / "o.yml", ["model_name=llama3.1-8b"])
    assert (config.base_emb_dim, config.base_num_decoder_layers, config.vocab_size) == (
        4096,
        32,
        128_256,
    )
    assert (config.learning_rate, config.use_sft) == (2e-5, True)


def test_variables_are_read_as_a_shell_reads_them(tmp_path: Path) -> None:
    script = """
    STEPS=7
    OUT=x-$(date +%F)
    model_id = "a line of Python"
    python3 - <<'EOF'
    steps = 3
    EOF
    python3 -m maxtext.trainers.pre_train.train run_name=a steps=${STEPS:?say} max_target_length=${LENGTH:-64} \\
        per_device_batch_size=${ROWS-2} dataset_type=grain grain_train_files=${DATA?}/<SHARDS>/$(date +%F) \\
        load_parameters_path=gs://b/${OUT?}/0/items
    """
    (tmp_path / "run.sh").write_text("\n".join(line.strip() for line in script.splitlines()))
    translation, _ = translated("maxtext", tmp_path / "run.sh")
    fates = {fate.word: fate for fate in translation.fates}
    assert (translation.settings["steps"], translation.settings["max_target_length"]) == ("7", "64")
    assert translation.settings["per_device_batch_size"] == "2"
    files = fates["grain_train_files"]
    assert files.fate == "needs you" and "does not set DATA, SHARDS, DATE" in files.says
    parameters = fates["load_parameters_path"]
    assert parameters.fate == "needs you" and "does not set DATE" in parameters.says


def words_of(path: Path, script: str) -> list[list[str]]:
    path.write_text(script)
    return [command.arguments for command in commands_of(path)]


DEFAULTS = """
A=1
EMPTY=
python3 -m maxtext.trainers.pre_train.train steps=${B:-${C:-$A}2} max_target_length=${EMPTY:-64}${EMPTY-65} \\
    run_name=a${A:+b}${B:+c} learning_rate=${D=0.5} adam_b1=${D}
"""
SUMS = """
USE=1
python3 -m maxtext.trainers.pre_train.train steps=$((1 - USE)) eval_steps=$((2 * 3 + $USE)) log_period=$((1 - MORE))
"""
LONG = "*".join("A" * 255)
WIDE = f"""
A=999999999999999999
python3 -m maxtext.trainers.pre_train.train steps=$((A * 9)) eval_steps=$((A * 10)) log_period=$(({LONG}))
"""
SHOWN = """
CMD="python3 -m maxtext.trainers.pre_train.train steps=3"
echo $CMD
$CMD
"""
PLACES = """
export DATA=gs://<DATA>/x
KIND=<"dpo" or "orpo">
EVERY=<>
python3 -m maxtext.trainers.pre_train.train dataset_path=$DATA/$DATA dpo.algo=$KIND checkpoint_period=$EVERY \\
    model_name=<a|b>
"""
BRANCHES = """
KIND=grain
if [ -z "${4}" ]; then
    ATTENTION=auto
fi
if [ "$KIND" == "hf" ]
then
    DATA="dataset_type=hf hf_path=a"
elif [[ "$KIND" == "grain" ]]; then
    DATA="dataset_type=grain"
    if [ -n "$OTHER" ]; then DATA="dataset_type=other"; else MORE=packing=false; fi
else
    DATA="dataset_type=tfds"
fi
if grep -q x file; then
    ASKED=true
fi
python3 -m maxtext.trainers.pre_train.train attention=$ATTENTION $DATA $MORE run_name=$ASKED
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (DEFAULTS, "steps=12 max_target_length=64 run_name=ab learning_rate=0.5 adam_b1=0.5"),
        (SHOWN, "steps=3"),
        (SUMS, "steps=0 eval_steps=7 log_period=$((1-MORE))"),
        (WIDE, f"steps=8999999999999999991 eval_steps=$((A*10)) log_period=$(({LONG}))"),
        (
            PLACES,
            "dataset_path=gs://${DATA}/x/gs://${DATA}/x dpo.algo=${dpo_or_orpo} "
            "checkpoint_period=${VALUE} model_name=${a_b}",
        ),
        (BRANCHES, "attention=auto dataset_type=grain packing=false run_name=true"),
    ],
)
def test_a_script_is_read_as_bash_reads_it(tmp_path: Path, script: str, words: str) -> None:
    assert words_of(tmp_path / "run.sh", script) == [words.split()]


@pytest.mark.parametrize(
    "script",
    [DEFAULTS, SUMS.replace("MORE", "0"), f"OTHER=\n{BRANCHES.replace('grep', 'python3')}"],
)
def test_the_count_of_maxtexts_commands_takes_the_words_of_bash(
    tmp_path: Path, script: str
) -> None:
    assert [list(command.arguments) for command in bash_commands(script)] == words_of(
        tmp_path / "run.sh", script
    )


def test_a_variable_that_may_hold_words_of_the_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"python3 -m {TRAINERS}.sft.train_sft model_name=llama3.1-8b $EXTRA\n"
    )
    assert "does not set EXTRA" in " ".join(translated("maxtext", tmp_path / "run.sh")[1])


@pytest.mark.parametrize(
    ("program", "word", "value", "fate"),
    [
        ("pre_train.train", "compiled_trainstep_file", "x.pickle", "ignored"),
        ("post_train.sft.train_sft", "grain_file_type", "parquet", "ignored"),
        ("post_train.sft.train_sft", "chat_template_path", "a.json", "needs you"),
        ("post_train.rl.train_rl", "chat_template_path", "a.json", "needs you"),
        (
            "post_train.dpo.train_dpo",
            "train_data_columns",
            "['input','chosen','rejected']",
            "needs you",
        ),
        (
            "post_train.dpo.train_dpo",
            "train_data_columns",
            "['input','better','worse']",
            "not supported",
        ),
    ],
)
def test_words_of_maxtexts_commands(
    tmp_path: Path, program: str, word: str, value: str, fate: str
) -> None:
    line = f"python3 -m maxtext.trainers.{program} model_name=llama3.1-8b {word}={value}\n"
    (tmp_path / "run.sh").write_text(line)
    fates = {fate.word: fate.fate for fate in translated("maxtext", tmp_path / "run.sh")[0].fates}
    assert fates[word] == fate


def test_a_command_that_becomes_another_one_is_counted_as_a_surprise() -> None:
    there = {
        word: yaml.safe_load(str(value))
        for word, value in yaml.safe_load(table("base.yml")).items()
        if value
    }
    there |= {"MODULE": "train_sft", "use_sft": True, "learning_rate": "2e-5"}
    ours = load_config(overrides=["model_name=llama3.1-8b", "learning_rate=3e-5", "steps=150001"])
    found = differences(there, ours, {})
    assert {"task: sft there, text here", "learning_rate: 2e-5 there, 3e-05 here"} < set(found)
    assert not any(line.startswith(("steps", "packing", "ramp")) for line in found)


def test_a_word_whose_variable_is_not_set_is_refused_by_the_variables_name(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"python3 -m {TRAINERS}.sft.train_sft model_name=${{MODEL?}} steps=${{STEPS?}}\n"
    )
    fates = {fate.word: fate for fate in translated("maxtext", tmp_path / "run.sh")[0].fates}
    assert (
        "does not set MODEL" in fates["model_name"].says
        and "does not set STEPS" in fates["steps"].says
    )
