"""maxbatch: a JAX language-model trainer in which the batch is exact.

    import maxbatch

    config = maxbatch.load_config("run.yml", overrides=["global_batch_size=256"])
    plan = maxbatch.BatchPlan.from_config(config, num_devices=8)
    maxbatch.train(config)

Importing maxbatch loads none of its parts, and JAX least of all: each name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from maxbatch.config.loading import load_config
    from maxbatch.plan.batch import BatchPlan
    from maxbatch.plan.rampup import RampupBatchManager
    from maxbatch.training.pretraining import train

__version__ = "0.1.0"

__all__ = ["BatchPlan", "ConfigError", "RampupBatchManager", "__version__", "load_config", "train"]

_HOME = {
    "BatchPlan": "maxbatch.plan.batch",
    "RampupBatchManager": "maxbatch.plan.rampup",
    "load_config": "maxbatch.config.loading",
    "train": "maxbatch.training.pretraining",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'maxbatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
