"""Completions of many prompts equal each prompt's own, up to a stop."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from maxbatch.around.sampling.completions import Completer
from maxbatch.around.sampling.sampler import Sampler, SamplingRules
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.parallel.mesh import make_mesh
from tests.around.sampling.test_sampler import model
from tests.helpers.tiny import LENGTH

RULES = SamplingRules(temperature=1.0, seed=3, max_new_tokens=20)
TOKENIZER = ByteTokenizer()


@pytest.mark.runs
def test_rows_in_one_pass_and_devices_change_no_completion_and_a_stop_cuts_it() -> None:
    config, params = model()
    rng = np.random.default_rng(0)
    # one is longer than a row
    prompts = [rng.integers(0, 128, length).tolist() for length in (1, 5, 40, 12, 3)]

    def completer(devices: int, most_rows: int | None) -> Completer:
        mesh = make_mesh(config, jax.devices()[:devices])
        return Completer(params, TOKENIZER, config.decoder, mesh, LENGTH, most_rows)

    complete = completer(4, 3)
    texts = complete(prompts, RULES, ())
    assert texts == completer(1, None)(prompts, RULES, ())
    stop = texts[3][2:4]
    assert complete(prompts, RULES, ("not there", stop)) == [text.split(stop)[0] for text in texts]

    kept = prompts[2][-(LENGTH - 20) :]  # room for the completion
    sampler = Sampler(config.decoder, TOKENIZER, None, prompt_length=LENGTH)
    alone = jax.device_get(sampler(params, sampler.rows([kept], [(2, 0, 0)]), RULES))
    assert texts[2] == TOKENIZER.decode(alone.tokens_BxL[0, len(kept) : alone.lengths_B[0]])
