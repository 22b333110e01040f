"""The parameters that reinforcement learning starts from: new, loaded, or from a short supervised
training.

That training is an ordinary run in `run_dir/warm_start`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import jax

from maxbatch.config.combined import PromptConfig
from maxbatch.config.config import Config
from maxbatch.config.sections import KEYS, RLConfig
from maxbatch.config.values import Value
from maxbatch.data.store.heldout import HeldOutFraction, Records
from maxbatch.kinds.prompt.ready_tasks import TASKS
from maxbatch.kinds.prompt.templates import Template
from maxbatch.parallel.hosts import broadcast
from maxbatch.parallel.trees import State
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.folder.run_folder import WARM_START
from maxbatch.run.pretraining import train
from maxbatch.run.session import Outcome
from maxbatch.run.weights.parameters import FirstParameters
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.update.state import TrainState


def warm_up(config: Config, batch: RLBatch, devices: list[jax.Device]) -> Outcome | None:
    """Trains on worked examples, or resumes doing so; returns None if the config has no warm start.

    Each update takes as many documents as a batch of reinforcement learning has pairs.
    """
    if not config.warm_start_steps:
        return None
    folder = as_path(warm_start_folder(config.run_dir))
    documents = config.warm_start_path or str(folder / "worked_examples.jsonl")

    def write_examples() -> None:
        # Examples left by a start without a checkpoint may have other settings.
        if not config.warm_start_path and not (
            as_path(documents).exists() and committed_steps(folder)
        ):
            folder.mkdir(parents=True, exist_ok=True)
            examples = worked_examples(
                config.prompting, config.warm_start_steps * batch.effective_batch_size
            )
            write_atomically(
                as_path(documents), "".join(json.dumps({"text": text}) + "\n" for text in examples)
            )

    broadcast(write_examples)
    return train(
        config.replaced(pretraining(config.rl, batch, folder, documents)), devices, concludes=False
    )


def worked_examples(config: PromptConfig, count: int) -> Iterator[str]:
    """Yields `count` documents, fixed by `data_shuffle_seed`, each a training prompt and a worked
    answer.
    """
    task, template = TASKS[config.dataset_type], Template(config.prompt_template)
    everything = task.records()
    split = HeldOutFraction.of(config.eval_fraction)
    training = Records(split, len(everything), held_out=False).numbers_S.tolist()
    draw = random.Random(f"worked examples {config.data_shuffle_seed}")
    for _ in range(count):
        record = everything[draw.choice(training)]
        yield f"{template.fill(record, 'a worked example')}{task.worked_answer(record, draw)}"


def pretraining(
    config: RLConfig, batch: RLBatch, folder: AnyPath, documents: str
) -> dict[str, Value]:
    """Returns the keys that the warm start changes; it has the same model and devices, and one
    document per row.
    """
    defaults = {name: key.default_value for name, key in KEYS.items() if not key.warm_start}
    return defaults | {
        "batch_size": None,
        "per_device_batch_size": batch.micro_batch_size // batch.num_trainer_devices or 1,
        "gradient_accumulation_steps": None,
        "global_batch_size": batch.effective_batch_size,
        # all devices train here, while later only some do, so the batch need not divide by them
        "batch_padding": True,
        "steps": config.warm_start_steps,
        "learning_rate": config.warm_start_learning_rate,
        "run_dir": str(folder),
        "dataset_type": "jsonl",
        "dataset_path": documents,
        "packing": False,
        "generate_prompt": "",
        "trainer_devices_fraction": 1,
        "sampler_devices_fraction": 1,
    }


def warm_start_folder(run_dir: str) -> str:
    return str(as_path(run_dir) / WARM_START)


def first_parameters(
    parameters: FirstParameters, abstract: TrainState, make: Callable[[], State]
) -> State:
    """Returns the model's parameters before the first update of reinforcement learning, without
    adapters.

    Args:
      make: makes them if they are not read.
    """
    if read := parameters.open(abstract.model):
        return read(abstract.model)
    return make()
