"""MaxText's own training on given rows: `python maxtext_program.py [--whole-embedding] ROWS.npz
START MODULE key=value ...`.

ROWS holds tokens, segments and weights [N, L + 1] of N rows: L inputs and the L targets that follow
them. START is a new folder for a checkpoint of the parameters before the first update. MODULE is
the trainer. MaxText itself writes everything else: its metrics (`metrics_file`) and its
checkpoints. With `--whole-embedding` logits are products with the embedding as it is, which MaxText
rounds to bfloat16. Runs in MaxText's environment, which has no maxbatch.
"""

import importlib
import os
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.layers import embeddings, nnx_decoders
from maxtext.trainers.pre_train import train

arguments = sys.argv[1:]
has_whole_embedding = arguments[0] == "--whole-embedding"
rows_file, start, module, *settings = arguments[has_whole_embedding:]
rows = np.load(rows_file)


class GivenRows:
    """MaxText's iterator of batches, from rows in their order."""

    def __init__(self, config):
        self.batch_size, self.next_row = config.global_batch_size_to_load, 0

    def __iter__(self):
        return self

    def reset(self):
        self.next_row = 0

    def __next__(self):
        batch = slice(self.next_row, self.next_row + self.batch_size)
        tokens, segments, weights = (
            rows[name][batch] for name in ("tokens", "segments", "weights")
        )
        if len(tokens) < self.batch_size:
            raise StopIteration
        self.next_row = batch.stop
        positions = np.stack([positions_of(row) for row in segments[:, :-1]])
        follows = (segments[:, 1:] == segments[:, :-1]) & (weights[:, 1:] > 0)
        return {
            "inputs": tokens[:, :-1],
            "inputs_segmentation": segments[:, :-1],
            "inputs_position": positions,
            "targets": tokens[:, 1:],
            "targets_segmentation": segments[:, :-1] * follows,
            "targets_position": positions,
        }


def positions_of(segments):
    """Returns the place of each token within its document: int32[L]."""
    places = np.arange(len(segments), dtype=np.int32)
    begins = np.diff(segments, prepend=-1) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0))


def keep_start(*arguments, **keywords):
    """Sets up MaxText's training, and writes the parameters that it begins with."""
    made = set_up(*arguments, **keywords)
    params = nnx.state(made[-1].model, nnx.Param).to_pure_dict()
    items = ocp.args.PyTreeSave({"params": {"params": params}})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            os.path.join(os.path.abspath(start), "0"), args=ocp.args.Composite(items=items)
        )
    return made


def attend_on_whole_embedding(query, table, attend_dtype, config, out_sharding=None):
    """Returns logits as MaxText's `attend_on_embedding`, without rounding the table."""
    return jnp.dot(query, table.T, preferred_element_type=attend_dtype)


if has_whole_embedding:
    for layers in (embeddings, nnx_decoders):
        layers.attend_on_embedding = attend_on_whole_embedding
set_up = train.train_utils.setup_train_loop
train.train_utils.setup_train_loop = keep_start
input_pipeline_interface.create_data_iterator = lambda config, mesh: (GivenRows(config), None)
trainer = importlib.import_module(module)
trainer.main([trainer.__file__, *settings])  # by its own file MaxText finds the file of its config
