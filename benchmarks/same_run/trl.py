"""The Trainer of transformers and the trainers of TRL, from the call of their config class, beside
ours.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.same_run import ours
from benchmarks.same_run.cases import VOCABULARY, Case, make_records, make_rows
from benchmarks.same_run.environments import run
from benchmarks.same_run.run_pair import Pair
from maxbatch.training.weights.parameters import open_parameters, open_source

_PROGRAM = Path(__file__).with_name("trl_program.py")
_MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
}
_CLASSES = {
    "Trainer": ("transformers", "TrainingArguments"),
    "SFTTrainer": ("trl", "SFTConfig"),
} | {"DPOTrainer": ("trl", "DPOConfig")}


def train_both(case: Case, python: Path, folder: Path, updates: int, seed: int) -> Pair:
    """Runs a trainer of transformers or TRL, imports the call of its config, and runs ours from its
    start.
    """
    arguments = {name: json.loads(value) for name, value in case.settings.items()}
    if "num_train_epochs" not in arguments:
        arguments["max_steps"] = updates
    module, config_class = _CLASSES[case.trainer]
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    (folder / "call.py").write_text(
        f"from {module} import {config_class}\n\nargs = {config_class}({call})\n"
    )
    ours.import_config("hf", folder / "call.py", folder / "imported.yml")

    batch = arguments["per_device_train_batch_size"] * arguments.get(
        "gradient_accumulation_steps", 1
    )
    num_rows = case.num_rows or batch * updates
    keys = [f"load_parameters_path={folder}/start", "model_name=auto"]
    rows = None
    if case.trainer == "Trainer":
        rows = make_rows(case.rows, num_rows, case.length - 1, seed)
        np.savez(folder / "rows.npz", **rows)
        keys.append(f"max_target_length={case.length}")
    else:
        make_records(case.trainer, num_rows, folder, seed)
        keys += [
            f"dataset_path={folder}/records.jsonl",
            "tokenizer_type=huggingface",
            f"tokenizer_path={folder}/tokenizer",
            "enable_data_shuffling=false",
        ]
    job = {"trainer": case.trainer, "arguments": arguments, "model": _MODEL, "seed": seed}
    (folder / "job.json").write_text(json.dumps(job))
    run([python, "-P", _PROGRAM, folder / "job.json"], folder / "trl.log")

    trained = ours.train(folder / "imported.yml", folder / "ours", rows, keys)
    params = ours.abstract(trained.config).params

    def arrays_in(name: str) -> dict[str, np.ndarray]:
        read = open_parameters(open_source(folder / name), trained.config.model, params)
        return ours.arrays_of(read(params))

    return Pair(
        trained.updates,
        ours.written_updates(folder / "theirs.jsonl"),
        arrays_in("start"),
        ours.end_of(trained, params),
        arrays_in("end"),
        arrays_in("squares"),
        [f"{config_class}({call})"],
    )
