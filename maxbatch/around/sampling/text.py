"""Text from a model: windows of tokens, one after another.

Shapes: L tokens of a window, P slots of its prompt.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.around.sampling.sampler import Sampler, SamplingRules
from maxbatch.config.combined import TextConfig
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.parallel.trees import State
from maxbatch.system.errors import TrainingError

_MAX_NEW_TOKENS = 128


def generate_text(
    params: State,
    tokenizer: Tokenizer,
    prompt: str,
    config: TextConfig,
    rules: SamplingRules,
    mesh: Mesh | None = None,
) -> str:
    """Returns the prompt and its continuation by the model, up to the end of the document.

    The same arguments give the same text. A window holds `max_target_length` tokens. When it is
    full, its last half becomes the prompt of the next window, and the model no longer sees what
    came before.

    Args:
      params: parameters of a `Decoder`, on one device or sharded; the config and the tokenizer are
        their run's.
      prompt: text to start from; an empty one starts a document.
      rules: how tokens are drawn. Without `max_new_tokens` at most 128 are added.
      mesh: the mesh of the parameters; None: the compiler follows their shardings.

    Raises:
      TrainingError: no token of a window has a finite log-probability.
    """
    ids = [int(i) for i in tokenizer.encode(prompt)]
    # Conversations begin as the tokenizer's template does, which ignores `add_bos`.
    if not ids or (tokenizer.begins_with_bos() if config.recipe.has_answers else config.add_bos):
        ids.insert(0, tokenizer.start_id)
    length = config.max_target_length
    half = length // 2
    # Few prompts are longer than half a window, and for the others the prefill is half as long.
    prompt_length = length if half < len(ids) < length else half
    # Unrolled layers would save a third of a token's time, but compile as long as ten thousand
    # tokens take.
    sampler = Sampler(
        config.replaced({"scan_layers": True}),
        tokenizer,
        mesh,
        prompt_length=prompt_length,
        rescores=False,
    )
    full = len(ids) + (rules.max_new_tokens or _MAX_NEW_TOKENS)
    window = 0
    while len(ids) < full:
        seen = ids if len(ids) < length else ids[-half:]
        rest = dataclasses.replace(rules, max_new_tokens=full - len(ids))
        responses = jax.device_get(sampler(params, sampler.rows([seen], [(window, 0, 0)]), rest))
        response_slots = slice(len(seen), responses.lengths_B[0])
        response = responses.tokens_BxL[0, response_slots].tolist()
        if not np.isfinite(responses.logprobs_BxL[0, response_slots]).any():
            raise TrainingError(
                "the model gives no token a finite log-probability; its parameters are not finite"
            )
        if response[-1] in (tokenizer.eos_id, *rules.end_ids):
            return tokenizer.decode(ids + response[:-1])
        ids += response
        window += 1
    return tokenizer.decode(ids)


def continued_text(
    params: State,
    tokenizer: Tokenizer,
    prompt: str,
    config: TextConfig,
    end_ids: tuple[int, ...],
    mesh: Mesh,
) -> str:
    """Returns `generate_text` by the rules that end a run (`maxbatch.run.observers`)."""
    return generate_text(params, tokenizer, prompt, config, SamplingRules(end_ids=end_ids), mesh)
