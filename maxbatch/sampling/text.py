"""Text from a model: windows of tokens, one after the other.

Shapes: L tokens of a window, P slots of its prompt.
"""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.sampling.sampler import Sampler


def generate_text(
    params: nnx.State,
    tokenizer: Tokenizer,
    prompt: str,
    config: ConfigDict,
    *,
    mesh: Mesh | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    nucleus_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Return the prompt and what the model makes of it, up to the end of the document.

    The same arguments give the same text. The window holds `max_target_length` tokens; where prompt or text fill it,
    its last half becomes the prompt of the next one, and what lies before is seen no more.

    Args:
      params: of a `Decoder`, on one device or sharded.
      tokenizer: of the run that trained them.
      prompt: where to start; an empty one starts a document.
      config: of that run.
      mesh: of the parameters; None: the compiler finds its way.
      max_new_tokens: most tokens to add, >= 1.
      temperature, top_k, nucleus_p, seed: see `Sampler`.
    """
    ids = [int(i) for i in tokenizer.encode(prompt)]
    if config.add_bos or not ids:
        starts = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
        ids.insert(0, next(token for token in starts if token is not None))
    length = config.max_target_length
    half = length // 2
    # Few prompts are longer than half a window, and for the others the prefill is half as long.
    prompt_length = length if half < len(ids) < length else half
    # Unrolled layers would save a third of the time of a token, and compile as long as it takes to draw ten thousand.
    scanned = config.copy_and_resolve_references()
    scanned.scan_layers = True
    sampler = Sampler(
        scanned,
        tokenizer,
        mesh,
        top_k=top_k,
        nucleus_p=nucleus_p,
        prompt_length=prompt_length,
        rescores=False,
    )
    full = len(ids) + max_new_tokens
    window = 0
    while len(ids) < full:
        seen = ids if len(ids) < length else ids[-half:]
        prompt_1xP = np.full((1, prompt_length), tokenizer.pad_id, np.int32)
        prompt_1xP[0, : len(seen)] = seen
        sampler.max_new_tokens = full - len(ids)
        lengths_1, draw_ids_1x3 = np.array([len(seen)], np.int32), np.array([[window, 0, 0]], np.uint32)
        responses = sampler(params, prompt_1xP, lengths_1, draw_ids_1x3, temperature, seed)
        tokens_1xL, ends_1 = jax.device_get((responses.tokens_BxL, responses.lengths_B))
        response = tokens_1xL[0, len(seen) : ends_1[0]].tolist()
        if response[-1] == tokenizer.eos_id:
            return tokenizer.decode(ids + response[:-1])
        ids += response
        window += 1
    return tokenizer.decode(ids)
