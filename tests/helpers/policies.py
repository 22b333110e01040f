"""The smallest run of reinforcement learning: prompts of arithmetic, a model of one layer, a reward
of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch import load_config
from maxbatch.config.config import Config
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.kinds.prompt import run as policy_run
from maxbatch.model.decoder import Decoder
from tests.helpers.tiny import TINY_MODEL, UNMEASURED, read_metrics

RL = str(Path(__file__).parents[2] / "configs/post_train/rl.yml")
GROUP = 4
REWARD = """
def digits(prompt, response, record):
    return sum(c.isdigit() for c in response) / 10


def is_long(prompt, response, record):
    return float(len(response) > 4)
"""
KEYS = (
    *TINY_MODEL[:-1],
    "base_num_decoder_layers=1",
    "max_target_length=24",
    "max_prefill_predict_length=16",
    "warm_start_steps=0",
    "batch_size=8",
    f"num_generations={GROUP}",
    "learning_rate=1e-2",
    "steps=3",
    "eval_interval=-1",
    "generate_prompt=",
    UNMEASURED,
)


def reward_file(folder: Path) -> str:
    path = folder / "rewards.py"
    path.write_text(REWARD)
    return f"reward={path}:digits"


def policy_config(run_dir: Path, *overrides: str) -> Config:
    keys = (*KEYS, reward_file(run_dir.parent), f"run_dir={run_dir}", "micro_batch_size=-1")
    return load_config(RL, [*keys, *overrides])


def train(run_dir: Path, *overrides: str, devices: int = 1) -> list[dict[str, Any]]:
    policy_run.train_policy(policy_config(run_dir, *overrides), jax.devices()[:devices])
    return read_metrics(run_dir)


@contextlib.contextmanager
def responses_soon_ended() -> Iterator[None]:
    """Makes first parameters that often draw the end of a response."""
    make = policy_run.first_parameters

    def soon_ended(*arguments: Any) -> nnx.State:
        state = make(*arguments)
        embedding = state["embedding"]  # and output
        embedding[...] = embedding[...].at[ByteTokenizer().eos_id].multiply(20.0)
        return state

    policy_run.first_parameters = soon_ended
    try:
        yield
    finally:
        policy_run.first_parameters = make


def trained_to_say(config: Config, *bias: tuple[int, float]) -> nnx.State:
    """Returns parameters with which the given ids have the given logits at every position, all
    others 0.
    """
    decoder = Decoder(config.decoder, rngs=nnx.Rngs(params=0))
    attention, mlp = decoder.layers.attention, decoder.layers.mlp
    # The stream is one everywhere: what the layers would add to it is nothing.
    for weight, value in (
        (decoder.embedding, 1.0),
        (attention.out, 0.0),
        (mlp.down, 0.0),
        (decoder.output, 0.0),
    ):
        weight[...] = jnp.full_like(weight[...], value)
    for token, logit in bias:
        decoder.output[...] = decoder.output[...].at[0, token].set(logit)
    return nnx.state(decoder, nnx.Param)
