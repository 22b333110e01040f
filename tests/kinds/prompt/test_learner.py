"""The side that trains and the side that samples, with options of the compiler."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.kinds.prompt import learner, rollout
from maxbatch.kinds.prompt.prompts import Prompt
from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.rampup import RampupBatchManager
from maxbatch.plan.update_settings import UpdatePlan
from maxbatch.system.terminal.warning import warn_once
from maxbatch.update.state import init_state
from tests.helpers.policies import KEYS, RL

# by the compiler of this machine, as an older one refuses a newer flag
REFUSED = {"xla_tpu_of_no_compiler": "true"}


@pytest.mark.runs
def test_rl_goes_on_without_a_flag_that_the_compiler_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_once.cache_clear()
    for module in (learner, rollout):
        monkeypatch.setattr(module, "program_options", lambda *_: REFUSED)
    config = load_config(RL, [*KEYS, "reward=math", "micro_batch_size=-1"])
    mesh = make_mesh(config, jax.devices()[:1])
    trains = learner.Learner(config.learner, mesh)
    state = init_state(config.update, trains.abstract)
    samples = rollout.Roller(config.rollout, ByteTokenizer(), mesh, num_pairs=2)
    prompt = Prompt(0, "x", np.array([ord("x")], np.int32), {})
    drawn = samples.read(
        [prompt], 2, samples.start(samples.take(state.params), [prompt], 2, temperature=1.0)
    )
    advantages = np.array([1, -1], np.float32)
    pairs = trains.place(
        drawn.tokens_RxL, drawn.mask_RxL, drawn.logprobs_RxL, drawn.lengths_R, advantages
    )
    for _ in range(2):
        trains.add(state, pairs)
    manager = RampupBatchManager.from_config(config)
    _, metrics = trains.step(state, UpdatePlan.from_config(config.plan, manager).at(0))
    assert np.isfinite(metrics.loss)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("maxbatch: warning: ") and "--xla_tpu_of_no_compiler" in line
