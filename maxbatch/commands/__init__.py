"""The commands, one module each, and the table that `maxbatch --help` shows of them."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command's help, and its module, which is imported for this command only."""

    module: str  # has `add_arguments(parser)` and `run(args)`, which returns the exit code
    summary: str  # one line for `maxbatch --help`
    examples: tuple[str, ...]  # command lines that work
    prints_json: bool = False  # whether it takes --json, which its errors follow


# fmt: off
COMMANDS: dict[str, Command] = {
    "plan": Command(
        "maxbatch.commands.plan",
        "Print the whole batch plan of a run, before any device is touched.",
        ("maxbatch plan",
         "maxbatch plan model_name=llama3-8b global_batch_size=1024 --devices 256 --hosts 64",
         "maxbatch plan per_device_batch_size=3 gradient_accumulation_steps=2 --devices 3 --layout --words",
         'maxbatch plan batch_size_schedule="0:256 1M:512 2Bt:1024" train_tokens=10B --devices 64 --json'),
        prints_json=True),
    "config": Command(
        "maxbatch.commands.config",
        "Print every config key with its value, its unit or rule, and where the value comes from.",
        ("maxbatch config",
         "maxbatch config run.yml model_name=llama3-8b",
         "maxbatch config per_device_batch_size"),
        prints_json=True),
    "import": Command(
        "maxbatch.commands.import_config",
        "Convert a config of MaxText, Hugging Face, TRL, DeepSpeed, Axolotl, Megatron, NeMo and others.",
        ("maxbatch import maxtext llama2_7b.yml --output run.yml",
         "maxbatch import auto pretrain.sh --skip-unsupported")),
    "train": Command(
        "maxbatch.commands.train",
        "Train a model; a checkpoint in run_dir is resumed.",
        ("maxbatch train",
         "maxbatch train run_dir=runs/wider base_emb_dim=256 train_tokens=10M",
         "maxbatch train dataset_type=text dataset_path='books/*.txt' global_batch_size=64 num_epochs=2",
         "maxbatch train run.yml --try",
         "maxbatch train run.yml enable_rampup_batch_size=true --simulate-devices 4",
         "maxbatch train run.yml expansion_factor_real_data=2 --simulate-devices 8 --simulate-hosts 4")),
    "fit": Command(
        "maxbatch.commands.fit",
        "Find the largest batch that fits in memory, and with --mesh auto the axes, by compiling.",
        ("maxbatch fit model_name=llama2-7b --topology v5p:2x2x4",
         "maxbatch fit run.yml global_batch_size=1024 --topology v5e:16x16 --slices 2 --write fitted.yml",
         "maxbatch fit model_name=llama2-7b global_batch_size=256 --topology v5p:4x4x4 --mesh auto"), prints_json=True),
    "compile": Command(
        "maxbatch.commands.compile",
        "Compile every program of a run ahead of time, for this machine or a TPU elsewhere.",
        ("maxbatch compile model_name=llama2-7b per_device_batch_size=4 --topology v5p:4x4x4 --output compiled",
         "maxbatch compile run.yml dcn_data_parallelism=-1 --topology v5e:16x16 --slices 4 --survive 2",
         "maxbatch compile run.yml --simulate-devices 8 --output compiled"), prints_json=True),
    "data": Command(
        "maxbatch.commands.data",
        "Show the stream of samples that training reads.",
        ("maxbatch data --first 0 --count 2",
         "maxbatch data run.yml --stats --json",
         "maxbatch data run.yml --fingerprint --first 1024 --count 64"), prints_json=True),
    "prepare": Command(
        "maxbatch.commands.prepare",
        "Tokenise a dataset into a folder that dataset_type=tokens reads.",
        ("maxbatch prepare dataset_type=jsonl dataset_path=web.jsonl --output web-tokens",
         "maxbatch prepare run.yml --output tokens --workers 64",
         "maxbatch prepare run.yml --output gs://my-bucket/tokens --ray auto",
         "maxbatch prepare --verify tokens")),
    "generate": Command(
        "maxbatch.commands.generate",
        "Continue a prompt with the model of a run, or talk with it.",
        ('maxbatch generate runs/default --prompt "def main("',
         'maxbatch generate runs/default --prompt "import " --max-new-tokens 200 --temperature 0.7',
         'maxbatch generate runs/sft --chat --prompt "Capital of France?"',
         "maxbatch generate smollm2 --chat")),
    "export": Command(
        "maxbatch.commands.export",
        "Write a model as a Hugging Face folder.",
        ("maxbatch export runs/default --output exported",
         "maxbatch export runs/default/checkpoints/200 --output gs://my-bucket/exported --dtype bfloat16")),
    "score": Command(
        "maxbatch.commands.score",
        "Print the log-probabilities, loss and perplexity of texts, tokens or conversations under a model.",
        ("maxbatch score runs/default page.jsonl",
         "maxbatch score smollm2 chats.jsonl --json",
         "maxbatch score runs/default/checkpoints/200 page.jsonl dtype=bfloat16"), prints_json=True),
    "evaluate": Command(
        "maxbatch.commands.evaluate",
        "Print the scores of a model on tasks of lm-evaluation-harness, or on task files of your own.",
        ("maxbatch evaluate smollm2 --tasks hellaswag,arc_easy",
         "maxbatch evaluate runs/default --tasks my-tasks --json",
         "maxbatch evaluate runs/default/checkpoints/200 --tasks gsm8k --num-fewshot 5 --limit 100"), prints_json=True),
    "audit": Command(
        "maxbatch.commands.audit",
        "Test any trainer: does the cut of a batch, its padding, its devices or a resume change the update?",
        ("maxbatch audit trainer.py:make",
         "maxbatch audit trainer.py:make --junit audit.xml",
         "maxbatch audit trainer.py:make --length 64 --vocab-size 32000 --simulate-devices 4 --json"),
        prints_json=True),
    "rl": Command(
        "maxbatch.commands.rl",
        "Train a policy with GRPO: prompts, sampled responses, rewards.",
        ("maxbatch rl",
         "maxbatch rl rl.yml batch_size=64 num_generations=8 micro_batch_size=64",
         "maxbatch rl rl.yml dataset_type=jsonl dataset_path=questions.jsonl reward=rewards.py:score")),
    "sweep": Command(
        "maxbatch.commands.sweep",
        "Train a run for each combination of swept config keys, and compare them.",
        ("maxbatch sweep batch_size",
         "maxbatch sweep configs/sweeps/batch_size.yml",
         "maxbatch sweep lr.yml --ray auto --resources TPU=4"), prints_json=True),
    "critical-batch": Command(
        "maxbatch.commands.critical_batch",
        "Measure the critical batch size along a run, and print a batch schedule from it.",
        ("maxbatch critical-batch runs/default",
         "maxbatch critical-batch runs/default --checkpoints 100,400,1600 --factors 1/2,1,2,4,8,16 --samples 4K")),
    "replay": Command(
        "maxbatch.commands.replay",
        "Take an update of a run again, and show it sample by sample.",
        ("maxbatch replay runs/default --step 120",
         "maxbatch replay runs/default --step 120 --top 3 --json",
         "maxbatch replay gs://my-bucket/runs/a --step 120 --checkpoint 100 --simulate-devices 2"), prints_json=True),
    "fork": Command(
        "maxbatch.commands.fork",
        "Make a new run that stands where another run stood after a step.",
        ("maxbatch fork runs/default --step 100 --output runs/forked",
         'maxbatch fork runs/default --step 100 --output runs/without skip_samples="9120:9128"',
         "maxbatch fork gs://my-bucket/runs/a --step 4000 --output gs://my-bucket/runs/b learning_rate=1e-4")),
    "report": Command(
        "maxbatch.commands.report",
        "Write one HTML page of plots and plans, for one or more runs or a sweep.",
        ("maxbatch report runs/default",
         "maxbatch report runs/a runs/b --output compared.html",
         "maxbatch report runs/default --watch"), prints_json=True),
    "env": Command(
        "maxbatch.commands.env",
        "Print the versions and settings of this machine, for a report.",
        ("maxbatch env",)),
    "completion": Command(
        "maxbatch.commands.completion",
        "Print the script by which a shell completes commands, flags and config keys.",
        ("maxbatch completion bash",
         "maxbatch completion fish > ~/.config/fish/completions/maxbatch.fish")),
}
# fmt: on
