"""maxbatch: a JAX language-model trainer in which the batch is exact.

    import maxbatch

    config = maxbatch.load_config("run.yml", global_batch_size=256)
    plan = maxbatch.BatchPlan.from_config(config, num_devices=8)
    outcome = maxbatch.train(config)
    outcome.last["loss"]
    maxbatch.generate(outcome.run_dir, "def main(")

Importing maxbatch loads none of its parts, and JAX least of all: each name is resolved when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from maxbatch.registered import register

if TYPE_CHECKING:
    from maxbatch.api import BatchFeed, FedBatch, open_feed, train
    from maxbatch.around.auditing.audit import Audit, audit
    from maxbatch.around.auditing.trainer import Layout
    from maxbatch.around.evaluate import evaluate
    from maxbatch.around.loaded_model import (
        LoadedModel,
        RecordScore,
        Scores,
        generate,
        load_model,
        score,
    )
    from maxbatch.config.config import Config
    from maxbatch.config.loading import load_config
    from maxbatch.data.stream.own import Samples
    from maxbatch.data.stream.stream import Stream, open_stream
    from maxbatch.parallel.mesh import make_mesh
    from maxbatch.plan.batch import BatchPlan
    from maxbatch.plan.learning_rate import LearningRate
    from maxbatch.plan.rampup import RampupBatchManager
    from maxbatch.run.folder.metrics import read_metrics
    from maxbatch.run.own import Loss, MakeModel, Rows, next_token_loss
    from maxbatch.run.record.recorder import Output
    from maxbatch.run.session import Outcome
    from maxbatch.run.weights.parameters import load_parameters
    from maxbatch.system.errors import ConfigError, StopTraining, TrainingError

register()

__version__ = "0.6.0.dev0"

__all__ = [
    "Audit",
    "BatchFeed",
    "BatchPlan",
    "Config",
    "ConfigError",
    "FedBatch",
    "Layout",
    "LearningRate",
    "LoadedModel",
    "Loss",
    "MakeModel",
    "Outcome",
    "Output",
    "RampupBatchManager",
    "RecordScore",
    "Rows",
    "Samples",
    "Scores",
    "StopTraining",
    "Stream",
    "TrainingError",
    "__version__",
    "audit",
    "evaluate",
    "generate",
    "load_config",
    "load_model",
    "load_parameters",
    "make_mesh",
    "next_token_loss",
    "open_feed",
    "open_stream",
    "read_metrics",
    "score",
    "train",
]

_HOME = {
    "Audit": "maxbatch.around.auditing.audit",
    "BatchFeed": "maxbatch.api",
    "BatchPlan": "maxbatch.plan.batch",
    "Config": "maxbatch.config.config",
    "ConfigError": "maxbatch.system.errors",
    "FedBatch": "maxbatch.api",
    "Layout": "maxbatch.around.auditing.trainer",
    "LearningRate": "maxbatch.plan.learning_rate",
    "LoadedModel": "maxbatch.around.loaded_model",
    "Loss": "maxbatch.run.own",
    "MakeModel": "maxbatch.run.own",
    "Outcome": "maxbatch.run.session",
    "Output": "maxbatch.run.record.recorder",
    "RampupBatchManager": "maxbatch.plan.rampup",
    "RecordScore": "maxbatch.around.loaded_model",
    "Rows": "maxbatch.run.own",
    "Samples": "maxbatch.data.stream.own",
    "Scores": "maxbatch.around.loaded_model",
    "StopTraining": "maxbatch.system.errors",
    "Stream": "maxbatch.data.stream.stream",
    "TrainingError": "maxbatch.system.errors",
    "audit": "maxbatch.around.auditing.audit",
    "evaluate": "maxbatch.around.evaluate",
    "generate": "maxbatch.around.loaded_model",
    "load_config": "maxbatch.config.loading",
    "load_model": "maxbatch.around.loaded_model",
    "load_parameters": "maxbatch.run.weights.parameters",
    "make_mesh": "maxbatch.parallel.mesh",
    "next_token_loss": "maxbatch.run.own",
    "open_feed": "maxbatch.api",
    "open_stream": "maxbatch.data.stream.stream",
    "read_metrics": "maxbatch.run.folder.metrics",
    "score": "maxbatch.around.loaded_model",
    "train": "maxbatch.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'maxbatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
