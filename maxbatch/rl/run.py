"""What a run of reinforcement learning is made of, in the order in which it can be refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

import jax
from ml_collections import ConfigDict

from maxbatch.parallel.mesh import must_take_turns, num_slices
from maxbatch.plan.batch import BatchPlan, Resume
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.rl.evaluation import PolicyEvaluator
from maxbatch.rl.learner import Learner
from maxbatch.rl.prompts import Prompts, PromptSource
from maxbatch.rl.rewards import Rewards
from maxbatch.rl.rollout import Roller
from maxbatch.rl.warm_start import first_parameters
from maxbatch.runs.run_folder import RunFolder
from maxbatch.system.errors import ConfigError
from maxbatch.training.checkpoints import Checkpoints, Position, model_identity
from maxbatch.training.run import warn
from maxbatch.training.state import init_opt_state, num_parameters


class PolicyRun:
    """A run that is ready to take its next batch, once `prepare` was called.

    Attributes:
      prompts: the stream of prompts.
      plan: the batch plan, anchored at `position`.
      batch: its numbers of prompts and pairs.
      position: where training stands.
      learner, roller: the devices that train and those that sample.
      shares_devices: whether they are the same.
      checkpoints: None where `enable_checkpointing` is false.

    Raises:
      ConfigError: something in the config, the data or the checkpoint cannot be used.
    """

    def __init__(
        self, config: ConfigDict, folder: RunFolder, stack: ExitStack, devices: Sequence[jax.Device]
    ) -> None:
        if config.compiled_dir:
            raise ConfigError(
                f"compiled_dir={config.compiled_dir}: holds programs of maxbatch train, and maxbatch rl has others; "
                'works: compiled_dir=""'
            )
        if config.warm_start_steps and not config.warm_start_path and config.dataset_type != "arithmetic":
            raise ConfigError(
                f"warm_start_steps={config.warm_start_steps}: without warm_start_path its documents are worked "
                f"examples of dataset_type=arithmetic, not {config.dataset_type}; works: warm_start_steps=0"
            )
        self.config, self._devices = config, devices
        self._source = PromptSource(config)
        self.prompts: Prompts = self._source.train()
        self.checkpoints: Checkpoints | None = None
        if config.enable_checkpointing:
            identity = {"data": self.prompts.identity, "model": model_identity(config)}
            self.checkpoints = Checkpoints(folder.path, config.max_num_checkpoints_to_keep, identity, warn)
            stack.enter_context(closing(self.checkpoints))
        newest = self.checkpoints.newest() if self.checkpoints else None
        self._stand_at(newest.position if newest else Position(), devices)
        for message in self.plan.warnings:
            warn(message)
        assert self.plan.rl is not None, "the config states a batch of prompts"
        self.batch: RLBatch = self.plan.rl
        self.shares_devices = self.batch.num_trainer_devices + self.batch.num_sampler_devices > len(devices)
        trainers = devices[: self.batch.num_trainer_devices]
        samplers = devices if self.shares_devices else devices[-self.batch.num_sampler_devices :]
        self.learner = Learner(config, trainers)
        tokenizer = self.prompts.tokenizer
        group = self.batch.num_generations
        self.roller = Roller(config, tokenizer, samplers, self.batch.rollout_micro_batch_size * group)
        self._samplers = samplers

    def _stand_at(self, position: Position, devices: Sequence[jax.Device]) -> None:
        self.position = position
        self.plan = BatchPlan.from_config(
            self.config,
            num_devices=len(devices),
            num_slices=num_slices(devices),
            samples_per_epoch=self.prompts.num_prompts,
            resume=Resume(position.step, position.samples_seen),
        )

    @property
    def total_steps(self) -> int:
        """Updates of the whole run, those before a resume included."""
        assert self.plan.total_steps is not None, "prompts that are here have known epochs"
        return self.plan.total_steps

    @property
    def one_at_a_time(self) -> bool:
        """Whether sampling and training must take turns."""
        return self.shares_devices and must_take_turns(self._samplers)

    @property
    def is_complete(self) -> bool:
        return self.position.step >= self.total_steps

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.learner.abstract.params)

    def prepare(self) -> None:
        """Makes or restores the state, and the reference that the divergence is measured from."""
        abstract = self.learner.abstract
        restored = self.checkpoints.restore(abstract) if self.checkpoints else None
        if restored:
            self.learner.state = restored.state
            if restored.position != self.position:  # the newest checkpoint was damaged
                self._stand_at(restored.position, self._devices)
        else:
            params = first_parameters(self.config, abstract)
            self.learner.state = init_opt_state(self.config, abstract, params)
        if self.config.grpo_beta:
            self.learner.refer_to(first_parameters(self.config, abstract))

    def evaluator(self, rewards: Rewards) -> PolicyEvaluator | None:
        """The evaluator; None where no eval is wanted or nothing is held out."""
        held_out = self._source.held_out() if self.config.eval_interval > 0 else None
        if held_out is None:
            return None
        num_pairs, num_prompts = self.plan.eval_batch_size, held_out.num_prompts
        if self.config.eval_steps != -1:
            # The chunks of an update, which eval takes over where its batch is not stated, do not change the prompts.
            is_stated = self.config.eval_per_device_batch_size is not None
            batch = num_pairs if is_stated else self.batch.effective_batch_size
            num_prompts = min(num_prompts, self.config.eval_steps * batch)
        roller = Roller(self.config, held_out.tokenizer, self._samplers, num_pairs)
        return PolicyEvaluator(self.config, held_out, num_prompts, roller, num_pairs, rewards)
