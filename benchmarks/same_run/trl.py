"""The Trainer of transformers and the trainers of TRL, from the call of their config class, beside
ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.same_run import ours
from benchmarks.same_run.cases import VOCABULARY, Case, make_records, make_rows
from benchmarks.same_run.environments import run
from benchmarks.same_run.run_pair import Pair
from maxbatch.around.huggingface.export.peft import export_adapters
from maxbatch.run.weights.parameters import open_parameters, open_source
from maxbatch.system.storage.safetensors import stored_tensors

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
    "DPOTrainer": ("trl", "DPOConfig"),
    "GRPOTrainer": ("trl", "GRPOConfig"),
}


def train_both(case: Case, python: Path, folder: Path, updates: int, seed: int) -> Pair:
    """Runs a trainer of transformers or TRL, imports the call of its config, and runs ours from its
    start. Adapters start with ours in both.
    """
    arguments = {name: json.loads(value) for name, value in case.settings.items()}
    if "num_train_epochs" not in arguments:
        arguments["max_steps"] = updates
    call = _write_call(case, arguments, folder / "call.py")
    ours.import_config("hf", folder / "call.py", folder / "imported.yml")

    keys = [f"load_parameters_path={folder}/start", "model_name=auto"]
    rows = None
    num_rows = case.num_rows or _num_rows(arguments, updates)
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
    job = {
        "trainer": case.trainer,
        "arguments": arguments,
        "model": _MODEL,
        "seed": seed,
        "step": "start",
        "has_adapters": case.adapters is not None,
    }
    _run_job(job, python, folder)
    if case.adapters is not None:
        # an update of no size leaves the adapters as they begin
        still = [*keys, "learning_rate=1e-30", "steps=1"]
        start = ours.train(folder / "imported.yml", folder / "still", rows, still)
        export_adapters(start.path, str(folder / "adapters"), None)
    _run_job({**job, "step": "train"}, python, folder)

    if case.trainer == "GRPOTrainer":
        keys += [
            f"reward={folder}/rewards.py:score",
            "add_bos=false",
            "max_prefill_predict_length=16",
            f"max_target_length={case.length}",
        ]
        lines = (folder / "records.jsonl").read_text().splitlines()
        completions = [json.loads(line)["given"] for line in lines]
        trained = ours.train_on_completions(
            folder / "imported.yml", folder / "ours", completions, keys
        )
    else:
        trained = ours.train(folder / "imported.yml", folder / "ours", rows, keys)
    theirs = ours.written_updates(folder / "theirs.jsonl")
    if case.adapters is not None:
        export_adapters(trained.path, str(folder / "our_end"), None)
        places = ("adapters", "our_end", "end", "squares")
        start, our_end, end, squares = (_tensors(folder / place) for place in places)
        return Pair(trained.updates, theirs, start, our_end, end, squares, [call])
    params = ours.abstract(trained.config).params

    def arrays_in(name: str) -> dict[str, np.ndarray]:
        read = open_parameters(open_source(folder / name), trained.config.model, params)
        return ours.arrays_of(read(params))

    return Pair(
        trained.updates,
        theirs,
        arrays_in("start"),
        ours.end_of(trained, params),
        arrays_in("end"),
        arrays_in("squares"),
        [call],
    )


def _write_call(case: Case, arguments: Mapping[str, object], file: Path) -> str:
    """Writes a Python file with the calls of a config, and returns them."""
    module, config_class = _CLASSES[case.trainer]
    calls = {config_class: arguments}
    text = f"from {module} import {config_class}\n"
    if case.adapters is not None:
        calls["LoraConfig"] = case.adapters
        text = (
            "from peft import LoraConfig\nfrom transformers import AutoModelForCausalLM\n"
            f"{text}\nAutoModelForCausalLM.from_pretrained('{file.parent}/start')\n"
        )
    lines = [
        f"{name}({', '.join(f'{word}={value!r}' for word, value in stated.items())})"
        for name, stated in calls.items()
    ]
    file.write_text(text + "\n" + "".join(f"{line}\n" for line in lines))
    return ", ".join(lines)


def _num_rows(arguments: Mapping[str, Any], updates: int) -> int:
    """Returns the rows, or the prompts, that the updates read."""
    batch = arguments["per_device_train_batch_size"] * arguments.get(
        "gradient_accumulation_steps", 1
    )
    prompts: int = batch // arguments.get("num_generations", 1)
    return prompts * updates // arguments.get("num_iterations", 1)


def _run_job(job: Mapping[str, object], python: Path, folder: Path) -> None:
    (folder / "job.json").write_text(json.dumps(job))
    run([python, "-P", _PROGRAM, folder / "job.json"], folder / "trl.log")


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Returns the adapters in a folder of PEFT, by its names."""
    return {
        name.removeprefix("base_model.model.model."): np.array(tensor.array())
        for name, tensor in stored_tensors(folder).items()
    }
