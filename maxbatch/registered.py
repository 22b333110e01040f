"""The tables that extend the core: kinds of sample, formats of files, experiment trackers, other
programs' words, configs and models, and observers of a run's model. A row is a name and the place
of an object.
"""

from __future__ import annotations

from maxbatch.system.registry import Table, state

TABLES = {
    Table.KINDS: {
        "text": "maxbatch.kinds.text.recipe:RECIPE",
        "conversation": "maxbatch.kinds.conversation.recipe:RECIPE",
        "pair": "maxbatch.kinds.pair.recipe:RECIPE",
        "prompt": "maxbatch.kinds.prompt.recipe:RECIPE",
    },
    # Values of `dataset_type`.
    Table.FORMATS: {
        "text": "maxbatch.around.formats.text:FORMAT",
        "jsonl": "maxbatch.around.formats.jsonl:FORMAT",
        "json": "maxbatch.around.formats.json_array:FORMAT",
        "csv": "maxbatch.around.formats.table:CSV",
        "tsv": "maxbatch.around.formats.table:TSV",
        "parquet": "maxbatch.around.formats.parquet:FORMAT",
        "arrayrecord": "maxbatch.around.formats.arrayrecord:FORMAT",
        "tfrecord": "maxbatch.around.formats.tfrecord:FORMAT",
    },
    # Values of `log_to`, beside tensorboard.
    Table.TRACKERS: {
        "wandb": "maxbatch.around.trackers.wandb:TRACKER",
        "mlflow": "maxbatch.around.trackers.mlflow:TRACKER",
    },
    Table.WORDS: {"words": "maxbatch.around.words.replacing:WORDS"},
    # Formats of `maxbatch import`.
    Table.IMPORTERS: {
        "maxtext": "maxbatch.around.importers.maxtext:FORMAT",
        "hf": "maxbatch.around.importers.hf:FORMAT",
        "deepspeed": "maxbatch.around.importers.deepspeed:FORMAT",
        "axolotl": "maxbatch.around.importers.axolotl:FORMAT",
        "megatron": "maxbatch.around.importers.megatron:FORMAT",
        "nemo": "maxbatch.around.importers.megatron:NEMO",
        "trl": "maxbatch.around.importers.trl:FORMAT",
        "llamafactory": "maxbatch.around.importers.llamafactory:FORMAT",
        "torchtitan": "maxbatch.around.importers.torchtitan:FORMAT",
    },
    # A folder is of the first form that it has.
    Table.MODEL_FORMS: {
        "huggingface": "maxbatch.around.huggingface.form:FORM",
        "maxtext": "maxbatch.around.maxtext.form:FORM",
    },
    Table.SOURCES: {
        "huggingface": "maxbatch.around.huggingface.arrays.reading:HuggingFaceFolder",
        "maxtext": "maxbatch.around.maxtext.checkpoints.reading:MaxTextCheckpoint",
    },
    Table.OBSERVERS: {
        "tasks": "maxbatch.around.harness.run_model:open_tasks",
        "answers": "maxbatch.around.sampling.greedy_answers:GreedyAnswers",
        "text": "maxbatch.around.sampling.text:continued_text",
    },
    Table.STATES: {
        "maxtext": "maxbatch.around.maxtext.checkpoints.reading:MaxTextCheckpoint",
    },
}


def register() -> None:
    """Makes the tables known to the core."""
    state(TABLES)
