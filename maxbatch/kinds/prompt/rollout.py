"""Responses to prompts: sampled chunk by chunk, read back as text, scored.

Shapes: P prompts per chunk, G responses per prompt, R = P x G pairs, L tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.around.sampling.sampler import Responses, Sampler, SamplingRules
from maxbatch.config.combined import RolloutConfig
from maxbatch.config.model_forms import end_tokens
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.kinds.prompt.prompts import Prompt
from maxbatch.kinds.prompt.reward_functions import ResponseToScore
from maxbatch.kinds.prompt.rewards import ResponseScores, Rewards
from maxbatch.parallel.hosts import gather
from maxbatch.parallel.resharding import Resharding
from maxbatch.parallel.sharding import parameter_shardings
from maxbatch.parallel.trees import State
from maxbatch.run.compile.compiler import jit_with
from maxbatch.run.compile.flags import program_options
from maxbatch.update.lora import adapters_of
from maxbatch.update.state import abstract_model

WORD = 1 << 32  # a prompt's index enters its key in two words


class SampledPairs(NamedTuple):
    """The pairs of a chunk, on the host; the responses to a prompt are adjacent."""

    prompts: Sequence[Prompt]
    tokens_RxL: np.ndarray  # int32: prompt, response, padding
    mask_RxL: np.ndarray  # bool: where the response is
    logprobs_RxL: np.ndarray  # float32, of the response's tokens
    lengths_R: np.ndarray  # int32, tokens of prompt and response
    texts: Sequence[str]  # of the responses


class Roller:
    """The sampling side, on its own mesh; every call has `num_pairs` rows (R), padded if needed.

    Args:
      group: adjacent rows that share a prompt and its prefill in every call; divides R.
      end_ids: ids of tokens that end a response, besides the tokenizer's and the model files'.

    Attributes:
      take: moves parameters to the sampling devices.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        num_pairs: int,
        group: int = 1,
        end_ids: tuple[int, ...] = (),
    ) -> None:
        config = _of_sampling(config)
        self._config, self._tokenizer, self._num_pairs, self._group = (
            config,
            tokenizer,
            num_pairs,
            group,
        )
        self._end_ids = (*end_tokens(config.load_parameters_path), *end_ids)
        self.take = Resharding(_policy_shardings(config, mesh))
        several_hosts = jax.process_count() > 1
        self._sampler = Sampler(
            config,
            tokenizer,
            mesh,
            prompt_length=config.max_prefill_predict_length,
            returns_whole=several_hosts,
            jit=jit_with(program_options(config.libtpu_flags, list(mesh.devices.flat))),
        )

    def start(
        self,
        params: State,
        prompts: Sequence[Prompt],
        num_generations: int,
        temperature: float,
        first_generation: int = 0,
    ) -> Responses:
        """Dispatches the sampling of responses.

        They depend only on the seed, the prompt's index, the generation's number and the
        parameters.
        """
        rows = [prompt for prompt in prompts for _ in range(num_generations)]
        filled = rows + [prompts[-1]] * (self._num_pairs - len(rows))
        read = filled[:: self._group]
        draws_Rx3 = np.zeros((self._num_pairs, 3), np.uint32)
        for row, prompt in enumerate(filled):
            generation = first_generation + row % num_generations
            draws_Rx3[row] = prompt.index % WORD, prompt.index // WORD % WORD, generation
        config = self._config.rl
        filters = config.decode_sampling_top_k, config.decode_sampling_nucleus_p
        rules = SamplingRules(temperature, *filters, config.sampler_seed, end_ids=self._end_ids)
        with self._precision:
            return self._sampler(
                params, self._sampler.rows([prompt.tokens for prompt in read], draws_Rx3), rules
            )

    def logprobs(self, params: State, tokens_RxL: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
        """Returns the log-probability of each token of prompts and responses under a policy, as a
        training pass in the type of sampling computes it: float32[R, L].

        Args:
          params: the policy, on the devices that sample.
          tokens_RxL: int32: prompt, response, padding; any number of rows.
          lengths_R: int32, tokens of prompt and response.
        """
        logprobs: list[np.ndarray] = []
        with self._precision:
            for begin in range(0, len(tokens_RxL), self._num_pairs):
                rows = slice(begin, begin + self._num_pairs)
                more = self._num_pairs - len(tokens_RxL[rows])
                tokens = np.pad(tokens_RxL[rows], ((0, more), (0, 0)))
                lengths = np.pad(lengths_R[rows], (0, more))
                logprobs.append(self._sampler.logprobs(params, tokens, lengths))
        return np.concatenate(logprobs)[: len(tokens_RxL)]

    @property
    def _precision(self) -> contextlib.AbstractContextManager[None]:
        """The precision of products: by default TPUs and GPUs round the factors of float32."""
        is_whole = self._config.rl.sampler_dtype == "float32"
        precision: contextlib.AbstractContextManager[None] = jax.default_matmul_precision(
            "highest" if is_whole else None
        )
        return precision

    def text(self, response: np.ndarray) -> str:
        """Decodes a response's tokens (int32[n]), without end tokens."""
        ends = {self._tokenizer.eos_id, *self._end_ids}
        return self._tokenizer.decode([token for token in response.tolist() if token not in ends])

    def read(
        self, prompts: Sequence[Prompt], num_generations: int, responses: Responses
    ) -> SampledPairs:
        """Waits for responses and decodes them."""
        rows = len(prompts) * num_generations
        fetched = (np.asarray(x)[:rows] for x in jax.device_get(responses))
        tokens_RxL, starts_R, lengths_R, logprobs_RxL = fetched
        slots_L = np.arange(tokens_RxL.shape[1])
        mask_RxL = (slots_L >= starts_R[:, None]) & (slots_L < lengths_R[:, None])
        texts = [
            self.text(tokens[start:end])
            for tokens, start, end in zip(tokens_RxL, starts_R, lengths_R, strict=True)
        ]
        return SampledPairs(prompts, tokens_RxL, mask_RxL, logprobs_RxL, lengths_R, texts)


def _policy_shardings(config: RolloutConfig, mesh: Mesh) -> State:
    """Returns the shardings of the policy's parameters on the sampling mesh, with unmerged
    adapters.
    """
    model = abstract_model(config)[1]
    shardings = parameter_shardings(model, mesh)
    adapters = adapters_of(config.adapters, config.quantization)
    if adapters is None or not adapters.are_apart:
        return shardings
    return adapters.beside(shardings, parameter_shardings(adapters.abstract(model), mesh))


def _of_sampling(config: RolloutConfig) -> RolloutConfig:
    """Returns the sampling model's keys, with `sampler_dtype` if stated."""
    if config.rl.sampler_dtype in (None, config.dtype):
        return config
    # cudnn only takes bfloat16
    return config.replaced({"dtype": config.rl.sampler_dtype, "attention": "auto"})


def score(rewards: Rewards, sampled: SampledPairs) -> ResponseScores:
    """Scores the pairs of a chunk; each host scores its share of the rows.

    Call it from one thread at a time; other threads may run.
    """
    group, count = len(sampled.texts) // len(sampled.prompts), len(sampled.texts)
    begin, end = (
        count * host // jax.process_count()
        for host in (jax.process_index(), jax.process_index() + 1)
    )
    questions = [
        ResponseToScore(
            sampled.prompts[row // group].text,
            sampled.texts[row],
            sampled.prompts[row // group].record,
        )
        for row in range(begin, end)
    ]
    scores = rewards.submit(questions).result()
    return (
        scores
        if jax.process_count() == 1
        else ResponseScores.joined(gather(scores.to_json(), "scores"))
    )


def chunks(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (first, number) of each chunk's prompts; the last may be short."""
    for start in range(first, first + count, size):
        yield start, min(size, first + count - start)
