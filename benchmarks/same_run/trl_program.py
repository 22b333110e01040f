"""The Trainer of transformers and the trainers of TRL on given rows: `python trl_program.py
JOB.json`.

The job names the trainer, its arguments, the sizes of a LLaMA and the data. Its step `start` writes
the model before the updates to the job's folder (`start`). Its step `train` writes the model after
them (`end`), Adam's second moments in the form of a model (`squares`), and `theirs.jsonl`, a line
per update; with adapters it begins with those in `adapters`, and `end` and `squares` are adapters.
Runs in an environment of the program's own, which has no maxbatch.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

job = json.loads(Path(sys.argv[1]).read_text())
folder = Path(sys.argv[1]).parent
torch.set_num_threads(1)
torch.manual_seed(job["seed"])
if job["step"] == "start":
    LlamaForCausalLM(LlamaConfig(**job["model"])).save_pretrained(folder / "start")
    sys.exit()
# TRL reads its reference from the same path
model = LlamaForCausalLM.from_pretrained(folder / "start")
if job["has_adapters"]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, folder / "adapters", is_trainable=True)
MACHINE = {
    "output_dir": str(folder / "output"),
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": job["seed"],
}


class Figures(TrainerCallback):
    """Writes the figures of each update."""

    def __init__(self, file):
        self.file = file

    def on_log(self, args, state, control, logs=None, **others):
        if "grad_norm" in logs:
            line = {
                "loss": logs["loss"],
                "grad_norm": logs["grad_norm"],
                "rate": logs["learning_rate"],
            }
            self.file.write(json.dumps(line) + "\n")


def rows():
    """Returns rows as tokens and labels, padded at their ends."""
    arrays = np.load(folder / "rows.npz")
    labels = np.where(arrays["weights"] > 0, arrays["tokens"], -100)
    mask = arrays["segments"] > 0
    columns = {"input_ids": arrays["tokens"], "labels": labels, "attention_mask": mask}
    return [
        {name: array[row].astype(int) for name, array in columns.items()}
        for row in range(len(mask))
    ]


def records():
    """Returns the records of a file, and the tokenizer of their words."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return Dataset.from_list(lines), AutoTokenizer.from_pretrained(folder / "tokenizer")


def trainer_of(arguments):
    if job["trainer"] == "Trainer":
        return Trainer(
            model,
            TrainingArguments(**arguments),
            train_dataset=rows(),
            data_collator=default_data_collator,
        )
    import trl

    data, tokenizer = records()
    config = getattr(trl, job["trainer"].replace("Trainer", "Config"))(**arguments)
    own = given_completions(data, tokenizer) if job["trainer"] == "GRPOTrainer" else {}
    return getattr(trl, job["trainer"])(
        model, args=config, train_dataset=data, processing_class=tokenizer, **own
    )


def given_completions(data, tokenizer):
    """Returns the arguments of GRPOTrainer that score the completions of the records and sample
    none.
    """
    sys.path.append(str(folder))
    import rewards

    completions = {record["prompt"]: record["given"] for record in data}

    def given(prompts, trainer):
        group = trainer.num_generations
        ids = [completions[prompt][row % group] for row, prompt in enumerate(prompts)]
        read = tokenizer(text=prompts)["input_ids"]
        return {"prompt_ids": read, "completion_ids": ids, "logprobs": None}

    def scores(prompts, completions, **others):
        return [
            rewards.score(prompt, text, {})
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    return {"reward_funcs": scores, "rollout_func": given}


if job["trainer"] != "GRPOTrainer":  # whose sampler repeats prompts, in order
    MACHINE["train_sampling_strategy"] = "sequential"
trainer = trainer_of({**MACHINE, **job["arguments"]})
with open(folder / "theirs.jsonl", "w") as file:
    trainer.add_callback(Figures(file))
    trainer.train()
model.save_pretrained(folder / "end")
moments = trainer.optimizer.state
while not moments and hasattr(trainer.optimizer, "optimizer"):  # accelerate's wrapper
    trainer.optimizer = trainer.optimizer.optimizer
    moments = trainer.optimizer.state
squares = {
    parameter: moments[parameter]["exp_avg_sq"]
    for parameter in model.parameters()
    if parameter.requires_grad
}
with torch.no_grad():
    for parameter, square in squares.items():
        parameter.copy_(square)
model.save_pretrained(folder / "squares")
