"""The commands, one module or folder each, and the table that `maxbatch --help` shows of them."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command's help, and its module, which is imported for this command only."""

    module: str  # has `add_arguments(parser)` and `run(args)`, which returns the exit code
    summary: str  # one line for `maxbatch --help`
    usage: str  # its arguments in `maxbatch COMMAND --help`
    examples: tuple[str, ...]  # command lines that work
    starts_jax: bool = True  # False: it does not, or prepares JAX itself where it does


# fmt: off
COMMANDS: dict[str, Command] = {
    "plan": Command(
        "maxbatch.commands.plan",
        "Print the whole batch plan of a run, before any device is touched.",
        "[CONFIG.yml] [key=value ...] [--devices N] [--hosts H] [--json] [--layout] [--words]"
        " [--survive K [--topology T]] [--failures-per-day F]",
        ("maxbatch plan",
         "maxbatch plan model_name=llama3-8b global_batch_size=1024 --devices 256 --hosts 64",
         "maxbatch plan per_device_batch_size=3 gradient_accumulation_steps=2 --devices 3 --layout --words",
         'maxbatch plan batch_size_schedule="0:256 1M:512 2Bt:1024" train_tokens=10B --devices 64 --json'),
        starts_jax=False),
    "config": Command(
        "maxbatch.commands.config",
        "Print every config key with its value, its unit or rule, and where the value comes from.",
        "[KEY] [CONFIG.yml] [key=value ...] [--json]",
        ("maxbatch config",
         "maxbatch config run.yml model_name=llama3-8b",
         "maxbatch config per_device_batch_size"),
        starts_jax=False),
    "import": Command(
        "maxbatch.commands.import_config.command",
        "Convert a config of MaxText, Hugging Face, DeepSpeed, Axolotl, Megatron, TRL or NeMo.",
        "FORMAT FILE [--output FILE] [--command N] [--skip-unsupported]",
        ("maxbatch import maxtext llama2_7b.yml --output run.yml",
         "maxbatch import auto pretrain.sh --skip-unsupported")),
    "train": Command(
        "maxbatch.commands.train",
        "Train a model; a checkpoint in run_dir is resumed.",
        "[CONFIG.yml] [key=value ...] [--simulate-devices N [--simulate-hosts H] | --try]",
        ("maxbatch train",
         "maxbatch train run_dir=runs/wider base_emb_dim=256 train_tokens=10M",
         "maxbatch train dataset_type=text dataset_path='books/*.txt' global_batch_size=64 num_epochs=2",
         "maxbatch train run.yml --try",
         "maxbatch train run.yml enable_rampup_batch_size=true --simulate-devices 4",
         "maxbatch train run.yml expansion_factor_real_data=2 --simulate-devices 8 --simulate-hosts 4")),
    "fit": Command(
        "maxbatch.commands.fit.command",
        "Find the largest batch that fits in memory, and with --mesh auto the axes, by compiling.",
        "[CONFIG.yml] [key=value ...] [--topology T [--slices S] [--survive K]] [--mesh auto] [--json] [--write FILE]",
        ("maxbatch fit model_name=llama2-7b --topology v5p:2x2x4",
         "maxbatch fit run.yml global_batch_size=1024 --topology v5e:16x16 --slices 2 --write fitted.yml",
         "maxbatch fit model_name=llama2-7b global_batch_size=256 --topology v5p:4x4x4 --mesh auto")),
    "compile": Command(
        "maxbatch.commands.compile",
        "Compile every program of a run ahead of time, for this machine or a TPU elsewhere.",
        "[CONFIG.yml] [key=value ...] [--topology T [--slices S] | --simulate-devices N [--simulate-hosts H]]"
        " [--survive K] [--output DIR] [--hlo DIR] [--json]",
        ("maxbatch compile model_name=llama2-7b per_device_batch_size=4 --topology v5p:4x4x4 --output compiled",
         "maxbatch compile run.yml dcn_data_parallelism=-1 --topology v5e:16x16 --slices 4 --survive 2",
         "maxbatch compile run.yml --simulate-devices 8 --output compiled")),
    "data": Command(
        "maxbatch.commands.data",
        "Show the stream of samples that training reads.",
        "[CONFIG.yml] [key=value ...] [--first S] [--count N] [--fingerprint | --stats] [--json]",
        ("maxbatch data --first 0 --count 2",
         "maxbatch data run.yml --stats --json",
         "maxbatch data run.yml --fingerprint --first 1024 --count 64")),
    "prepare": Command(
        "maxbatch.commands.prepare",
        "Tokenise a dataset into a folder that dataset_type=tokens reads.",
        "[CONFIG.yml] [key=value ...] --output FOLDER [--workers N] [--ray ADDRESS [--resources CPU=2]]"
        " | --verify FOLDER",
        ("maxbatch prepare dataset_type=jsonl dataset_path=web.jsonl --output web-tokens",
         "maxbatch prepare run.yml --output tokens --workers 64",
         "maxbatch prepare run.yml --output gs://my-bucket/tokens --ray auto",
         "maxbatch prepare --verify tokens")),
    "generate": Command(
        "maxbatch.commands.generate",
        "Continue a prompt with the model of a run, or talk with it.",
        'MODEL [--prompt "..."] [--chat] [--system "..."] [--max-new-tokens N] [--temperature T] [--top-k K] '
        "[--top-p P] [--seed S] [--averaged]",
        ('maxbatch generate runs/default --prompt "def main("',
         'maxbatch generate runs/default --prompt "import " --max-new-tokens 200 --temperature 0.7',
         'maxbatch generate runs/sft --chat --prompt "Capital of France?"',
         "maxbatch generate smollm2 --chat")),
    "export": Command(
        "maxbatch.commands.export",
        "Write a model as a Hugging Face folder.",
        "MODEL --output DIR [--dtype float32|bfloat16|float16] [--averaged]",
        ("maxbatch export runs/default --output exported",
         "maxbatch export runs/default/checkpoints/200 --output gs://my-bucket/exported --dtype bfloat16")),
    "score": Command(
        "maxbatch.commands.score",
        "Print the log-probabilities, loss and perplexity of texts, tokens or conversations under a model.",
        "MODEL FILE [key=value ...] [--averaged] [--json] [--simulate-devices N]",
        ("maxbatch score runs/default page.jsonl",
         "maxbatch score smollm2 chats.jsonl --json",
         "maxbatch score runs/default/checkpoints/200 page.jsonl dtype=bfloat16")),
    "evaluate": Command(
        "maxbatch.commands.evaluate",
        "Print the scores of a model on tasks of lm-evaluation-harness, or on task files of your own.",
        "MODEL --tasks TASK,... [key=value ...] [--include-path DIR] [--num-fewshot K] [--limit N] [--batch-size N] "
        "[--apply-chat-template] [--averaged] [--json] [--simulate-devices N]",
        ("maxbatch evaluate smollm2 --tasks hellaswag,arc_easy",
         "maxbatch evaluate runs/default --tasks my-tasks --json",
         "maxbatch evaluate runs/default/checkpoints/200 --tasks gsm8k --num-fewshot 5 --limit 100")),
    "audit": Command(
        "maxbatch.commands.audit",
        "Test any trainer: does the cut of a batch, its padding, its devices or a resume change the update?",
        "FILE.py:make [--length L] [--vocab-size V] [--updates U] [--seed S] [--json] [--junit FILE] "
        "[--simulate-devices N]",
        ("maxbatch audit trainer.py:make",
         "maxbatch audit trainer.py:make --junit audit.xml",
         "maxbatch audit trainer.py:make --length 64 --vocab-size 32000 --simulate-devices 4 --json")),
    "rl": Command(
        "maxbatch.commands.rl",
        "Train a policy with GRPO: prompts, sampled responses, rewards.",
        "[CONFIG.yml] [key=value ...] [--simulate-devices N [--simulate-hosts H]]",
        ("maxbatch rl",
         "maxbatch rl rl.yml batch_size=64 num_generations=8 micro_batch_size=64",
         "maxbatch rl rl.yml dataset_type=jsonl dataset_path=questions.jsonl reward=rewards.py:score")),
    "sweep": Command(
        "maxbatch.commands.sweep.command",
        "Train a run for each combination of swept config keys, and compare them.",
        "SWEEP.yml [--retry-failed] [--ray ADDRESS [--resources TPU=4]] [--json]",
        ("maxbatch sweep batch_size",
         "maxbatch sweep configs/sweeps/batch_size.yml",
         "maxbatch sweep lr.yml --ray auto --resources TPU=4")),
    "critical-batch": Command(
        "maxbatch.commands.critical_batch.command",
        "Measure the critical batch size along a run, and print a batch schedule from it.",
        "RUN_DIR [--checkpoints STEP,...] [--factors F,...] [--samples N] [--scaling sqrt|linear|none]"
        " [--tolerance NATS] [--simulate-devices N]",
        ("maxbatch critical-batch runs/default",
         "maxbatch critical-batch runs/default --checkpoints 100,400,1600 --factors 1/2,1,2,4,8,16 --samples 4K")),
    "report": Command(
        "maxbatch.commands.report.command",
        "Write one HTML page of plots and plans, for one or more runs or a sweep.",
        "RUN_DIR [RUN_DIR ...] [--output FILE] [--json] [--watch [SECONDS]]",
        ("maxbatch report runs/default",
         "maxbatch report runs/a runs/b --output compared.html",
         "maxbatch report runs/default --watch")),
}
# fmt: on
