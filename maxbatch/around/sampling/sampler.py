"""Responses from a model: the prompt in one pass, then token after token with a key-value cache.

The draws of a row depend on its own ids, its tokens and the parameters. They do not depend on the
other rows, their number, or the devices that share them, except that sums in another order may tip
a draw between two tokens of equal probability to float precision.

Shapes: Q prompts, B rows, P <= L slots of a prompt, L slots of a row (prompt and response), D
model, V vocabulary; S devices that share the rows, R rows of one that are still drawn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from maxbatch.config.combined import DecoderConfig
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.families.matrices import NORMS
from maxbatch.families.parameter import STACKS
from maxbatch.model.cache import Cache, Caches, StateCache
from maxbatch.model.decoder import Decoder
from maxbatch.model.eight_bits import check_platform
from maxbatch.model.loss import token_logprobs
from maxbatch.model.products import Adapted, product
from maxbatch.parallel.hosts import warn
from maxbatch.parallel.sharding import activation_constraint, num_shards, unconstrained
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.system.errors import TrainingError

_COOLEST = 1e-6  # dividing by a temperature below it could overflow
_ROOMS = (64, 256, 1024, 4096, 16384)  # slots of a response
# From this room on, a device continues with a quarter of its rows once the unfinished ones fit into
# it. The quarter has a loop of its own, which takes as long to compile as the first.
_LEAST_QUARTERED = 256
# slots of a prompt of any length; fewer would save little and need more programs
_LEAST_PROMPT = 32


@dataclasses.dataclass(frozen=True)
class SamplingRules:
    """The rules by which tokens are drawn.

    The nucleus is taken at the temperature, among the top k (`keep_likeliest`).
    """

    temperature: float = 0.8  # divides the logits, >= 0; at 0 the likeliest token is taken
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    # draw from the likeliest tokens that together have this probability; in (0, 1]
    nucleus_p: float = 1.0
    seed: int = 0  # of the draws, in [0, 2^32)
    max_new_tokens: int | None = None  # most tokens of a response; None: as many as there are slots
    end_ids: tuple[int, ...] = ()  # of tokens that end a response, besides the tokenizer's own


class PromptRows(NamedTuple):
    """Prompts, and the draws of B / Q responses to each, one after another."""

    # int32, each from the start of its row; the slots after it are ignored
    tokens_QxP: np.ndarray | jax.Array
    lengths_Q: np.ndarray | jax.Array  # int32 in [1, P]; a prompt of L tokens has no response
    # uint32; the draws of a row depend on them and on the seed
    draw_ids_Bx3: np.ndarray | jax.Array


class Responses(NamedTuple):
    """The responses to a batch of prompts, as device arrays."""

    # int32: prompt, response (with its end token if it was drawn), then pad_id
    tokens_BxL: jax.Array
    prompt_lengths_B: jax.Array  # int32
    lengths_B: jax.Array  # int32: tokens of prompt and response
    # float32: log-probability of the token at t given those before it, in the model's own full
    # softmax (temperature 1, all tokens); 0 outside of the response
    logprobs_BxL: jax.Array


class _Program(NamedTuple):
    """The static facts of a compiled program, besides the shapes of its arguments."""

    graphdef: nnx.GraphDef[Decoder]
    length: int  # L
    row_shards: int  # devices that the rows are split over
    returns_whole: bool  # every device returns all rows
    truncates: bool  # draws from the top k or the nucleus only
    pad_id: int
    rescores: bool  # reads the responses once more, as training does, for their log-probabilities


class _Rules(NamedTuple):
    """The rules as arguments of the program, so that one program serves them all."""

    temperature: jax.Array
    top_k: jax.Array
    nucleus_p: jax.Array
    seed: jax.Array
    max_new_tokens: jax.Array
    drawable_V: jax.Array  # bool
    ends_V: jax.Array  # bool


class Sampler:
    """A sampler of responses. It compiles once for every number of rows; the layers run in a plain
    loop.

    Before the first token the weights are cast to the compute dtype and gathered, except along the
    tensor axis: once, not for every token.

    Args:
      tokenizer: ids that are not text (padding, beginning of text, rows of the embedding beyond its
        vocabulary) are never drawn; `eos_id` ends a response.
      mesh: rows are split over its data, fsdp and expert axes, heads and widths over tensor; None:
        the compiler follows the shardings of the parameters.
      rescores: true: a training pass over the responses gives the log-probabilities where a pass
        over one token may differ: below float32 by rounding (up to 0.05), and under LongRoPE, which
        assumes the longest text of a row.
      returns_whole: true: every device returns all rows, so that each of several hosts can read
        them.
      jit: makes the program of a call; `jax.jit`: all samplers share their programs.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tokenizer: Tokenizer,
        mesh: Mesh | None,
        *,
        prompt_length: int,
        rescores: bool = True,
        returns_whole: bool = False,
        jit: Callable[..., Callable[..., Responses]] = jax.jit,
    ) -> None:
        length = config.max_target_length
        if not 1 <= prompt_length <= length:
            raise ValueError(
                f"prompt_length={prompt_length} must be in [1, max_target_length={length}]"
            )
        constrain = activation_constraint(mesh, BATCH_AXES) if mesh else unconstrained
        check_platform(config.quantization, constrain.platform)
        model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), constrain=constrain))
        if config.num_experts > 1 and config.capacity_factor > 0:
            warn(
                f"capacity_factor={config.capacity_factor:g} holds in training and not in "
                "sampling, which does not know the tokens of a whole row; every token goes to "
                "all of its experts"
            )
        switches_rope = (
            config.rope_type == "longrope" and length > config.original_max_position_embeddings
        )
        self._program = _Program(
            graphdef=nnx.graphdef(model),
            length=length,
            row_shards=num_shards(mesh) if mesh else 1,
            returns_whole=returns_whole,
            truncates=False,
            pad_id=tokenizer.pad_id,
            rescores=rescores
            and (config.dtype != "float32" or bool(config.quantization) or switches_rope),
        )
        self._drawable_V = np.arange(config.vocab_size) < tokenizer.vocab_size
        # A token may have several of these roles, and the end of the text must stay drawable.
        never = (tokenizer.bos_id, tokenizer.pad_id)
        self._drawable_V[[i for i in never if i not in (None, tokenizer.eos_id)]] = False
        # the compiled result of `lower`; all calls use it
        self.executable: Callable[..., Responses] | None = None
        self._respond: Callable[[_Program], Callable[..., Responses]] = cache(
            lambda program: (
                partial(jit_responses, program)
                if jit is jax.jit
                else jit(partial(_responses, program))
            )
        )
        self._tokenizer_end = tokenizer.eos_id
        self._prompt_length = prompt_length

    def rows(
        self, prompts: Sequence[Sequence[int] | np.ndarray], draw_ids: ArrayLike
    ) -> PromptRows:
        """Returns prompts, each a list of ids, as rows; `draw_ids`: [B, 3]."""
        tokens_QxP = np.full((len(prompts), self._prompt_length), self._program.pad_id, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_QxP[row, : len(prompt)] = prompt
        return PromptRows(
            tokens_QxP, np.array([*map(len, prompts)], np.int32), np.array(draw_ids, np.uint32)
        )

    def __call__(self, params: State, prompts: PromptRows, rules: SamplingRules) -> Responses:
        """Returns the responses; asynchronous, in one program.

        A prompt is read once for all of its responses, or once per device that shares them.

        Args:
          params: parameters of a `Decoder`, on one device or sharded.
        """
        program, tensors = self._arguments(prompts, rules)
        respond = self.executable or self._respond(program)
        placed: Responses = respond(params, prompts, tensors)
        return placed

    def logprobs(self, params: State, tokens_BxL: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
        """Returns the log-probability of each token of rows given those before it, as a training
        pass computes it: float32[B, L].

        Args:
          params: parameters of a `Decoder`, on one device or sharded.
          tokens_BxL: int32: tokens, then padding.
          lengths_B: int32, tokens of each row.
        """
        segments_BxL = (np.arange(tokens_BxL.shape[1]) < lengths_B[:, None]).astype(np.int32)
        more = (0, -len(tokens_BxL) % self._program.row_shards), (0, 0)
        rows = np.pad(tokens_BxL, more), np.pad(segments_BxL, more)
        return np.asarray(_logprobs(self._program, params, *rows))[: len(tokens_BxL)]

    def lower(
        self, abstract_params: State, num_rows: int, rules: SamplingRules
    ) -> jax.stages.Lowered:
        """Returns the lowered program of a call with such parameters and rules, for
        `executable`.
        """
        prompts = self.rows([[0]] * num_rows, [[0] * 3] * num_rows)
        program, tensors = self._arguments(prompts, rules)
        lowered: jax.stages.Lowered = jit_responses.lower(
            program, abstract_params, prompts, tensors
        )
        return lowered

    def growing(
        self,
        params: State,
        prompts: PromptRows,
        rules: SamplingRules,
        piece_tokens: int,
        is_enough: Callable[[int, list[int]], bool] = lambda row, ids: False,
    ) -> Iterator[list[list[int]]]:
        """Yields the ids of the responses so far: none, then those after each piece; an end token
        that was drawn too.

        In the end they equal those of a call with the same arguments, except that a response ends
        soon after `is_enough(row, ids)` is true for its ids so far.

        Args:
          prompts: as many as there are responses.
          piece_tokens: tokens of a piece; weights are cast once per piece.

        Raises:
          TrainingError: a token has no finite log-probability.
        """
        responses: list[list[int]] = [[] for _ in prompts.lengths_Q]
        yield responses
        more = -len(responses) % self._program.row_shards
        tokens_BxP, draw_ids_Bx3 = (
            np.pad(x, ((0, more), (0, 0))) for x in (prompts.tokens_QxP, prompts.draw_ids_Bx3)
        )
        prompt_lengths_B = np.pad(prompts.lengths_Q, (0, more), constant_values=1)
        program, tensors = self._arguments(
            PromptRows(tokens_BxP, prompt_lengths_B, draw_ids_Bx3), rules
        )
        limits_B = np.array(_limits(program, prompt_lengths_B, tensors))
        limits_B[len(responses) :] = 1  # the added rows count as full from the start
        loop = _begin(program, params, tokens_BxP, prompt_lengths_B, limits_B)
        done_B = np.array(loop.done_B)
        while not done_B.all():
            loop = _continue(
                program, params, loop, draw_ids_Bx3, limits_B, tensors, np.int32(piece_tokens)
            )
            tokens_BxL, logprobs_BxL, lengths_B, done_B = map(np.array, jax.device_get(loop[1:]))
            for row, response in enumerate(responses):
                new = slice(prompt_lengths_B[row] + len(response), lengths_B[row])
                _check_finite(logprobs_BxL[row, new])
                response += tokens_BxL[row, new].tolist()
                done_B[row] = done_B[row] or is_enough(row, response)
            yield responses
            loop = loop._replace(done_B=jax.device_put(done_B, loop.done_B.sharding))

    def _arguments(self, prompts: PromptRows, rules: SamplingRules) -> tuple[_Program, _Rules]:
        """Returns the program of the rules, and the rules as its last argument."""
        num_prompts, slots = prompts.tokens_QxP.shape
        if slots != self._prompt_length:
            raise ValueError(f"prompts of {slots} slots, made for {self._prompt_length}")
        if len(prompts.draw_ids_Bx3) % num_prompts:
            raise ValueError(
                f"{len(prompts.draw_ids_Bx3)} responses to {num_prompts} prompts: as many to each"
            )
        vocabulary, limit = len(self._drawable_V), rules.max_new_tokens
        ends_V = np.isin(
            np.arange(vocabulary),
            [i for i in (self._tokenizer_end, *rules.end_ids) if i is not None],
        )
        program = self._program._replace(truncates=rules.top_k > 0 or rules.nucleus_p < 1)
        arguments: list[Any] = [
            np.float32(rules.temperature),
            np.int32(min(rules.top_k or vocabulary, vocabulary)),
            np.float32(rules.nucleus_p),
            np.uint32(rules.seed),
            np.int32(program.length if limit is None else limit),
            self._drawable_V | ends_V,
            ends_V,
        ]
        return program, _Rules(*arguments)


class Samplers:
    """The samplers of a model for prompts of any length; powers of two, so that few programs serve
    all.

    Args:
      context: the most tokens of a row.
    """

    def __init__(
        self, config: DecoderConfig, tokenizer: Tokenizer, mesh: Mesh | None, context: int
    ) -> None:
        self._config, self._tokenizer, self._mesh, self._context = config, tokenizer, mesh, context
        self._made: dict[tuple[int, int], Sampler] = {}

    def slots(self, num_tokens: int, most: int) -> tuple[int, int]:
        """Returns the slots of a row and of its prompt, for a prompt of `num_tokens` tokens and
        `most` new ones.
        """
        of_prompt = min(self._context, max(_LEAST_PROMPT, _power_of_two(num_tokens)))
        return min(self._context, _power_of_two(of_prompt + most)), of_prompt

    def of(self, slots: tuple[int, int]) -> Sampler:
        """Returns the sampler of rows with such slots."""
        if slots not in self._made:
            length, prompt_length = slots
            config = self._config.replaced({"max_target_length": length, "scan_layers": True})
            self._made[slots] = Sampler(
                config, self._tokenizer, self._mesh, prompt_length=prompt_length, rescores=False
            )
        return self._made[slots]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _responses(program: _Program, params: State, prompts: PromptRows, rules: _Rules) -> Responses:
    """Returns whole responses: one prefill, then a loop that ends with the longest response."""
    prompts_QxP, prompt_lengths_Q, draw_ids_Bx3 = map(jnp.asarray, prompts)
    decoder = _gathered(nnx.merge(program.graphdef, params))
    rows, length = draw_ids_Bx3.shape[0], program.length
    group = rows // prompts_QxP.shape[0]
    # Prompts are added until the devices divide the rows; the added rows count as full from the
    # start.
    more_prompts = -prompts_QxP.shape[0] % (
        program.row_shards // math.gcd(program.row_shards, group)
    )
    more = more_prompts * group
    prompts_QxP = jnp.pad(prompts_QxP, ((0, more_prompts), (0, 0)))
    prompt_lengths_Q = jnp.pad(prompt_lengths_Q, (0, more_prompts), constant_values=1)
    limits_Q = _limits(program, prompt_lengths_Q, rules)
    limits_Q = jnp.where(jnp.arange(limits_Q.size) < limits_Q.size - more_prompts, limits_Q, 1)
    # A prompt is read by every device that has rows of it.
    each = min(
        n
        for n in range(1, group + 1)
        if group % n == 0 and n * limits_Q.size % program.row_shards == 0
    )
    prompts_RxP, lengths_R, limits_R = (
        jnp.repeat(x, each, axis=0) for x in (prompts_QxP, prompt_lengths_Q, limits_Q)
    )
    prompt_lengths_B, limits_B = (
        jnp.repeat(x, group, axis=0) for x in (prompt_lengths_Q, limits_Q)
    )

    slots_BxL = jax.lax.broadcasted_iota(jnp.int32, (rows + more, length), 1)
    draw_ids_Bx3 = jnp.pad(draw_ids_Bx3, ((0, more), (0, 0)))
    next_token = _NextToken.of(program, decoder, draw_ids_Bx3, limits_B, rules)
    end = _prefilled(program, decoder, prompts_RxP, lengths_R, limits_R, prompt_lengths_B, limits_B)
    for slots in _rooms(length, prompts_QxP.shape[1]):
        end = end._replace(caches=end.caches.with_room_for(slots))
        end = _drawn(next_token, end, slots, program.row_shards)
    logprobs_BxL = end.logprobs_BxL
    if program.rescores:
        is_token_BxL = slots_BxL < end.lengths_B[:, None]
        whole, segments_BxL = nnx.merge(program.graphdef, params), is_token_BxL.astype(jnp.int32)
        scores = token_logprobs(
            whole, end.tokens_BxL, segments_BxL, batch_shards=program.row_shards
        )
        is_response_BxL = is_token_BxL & (slots_BxL >= prompt_lengths_B[:, None])
        logprobs_BxL = jnp.where(is_response_BxL, scores.logprobs_MxL, 0.0)
    # If the devices do not divide the rows, all devices get all rows.
    row_axis = None if more or program.returns_whole else "batch"
    responses = Responses(end.tokens_BxL, prompt_lengths_B, end.lengths_B, logprobs_BxL)
    placed: Responses = jax.tree.map(
        lambda x: decoder.constrain(x[:rows], (row_axis, None)[: x.ndim]), responses
    )
    return placed


jit_responses = jax.jit(_responses, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _logprobs(
    program: _Program, params: State, tokens_BxL: jax.Array, segments_BxL: jax.Array
) -> jax.Array:
    decoder = nnx.merge(program.graphdef, params)
    scores = token_logprobs(decoder, tokens_BxL, segments_BxL, batch_shards=program.row_shards)
    return scores.logprobs_MxL


def _check_finite(logprobs: np.ndarray) -> None:
    if not np.isfinite(logprobs).all():
        raise TrainingError(
            "the model gives no token a finite log-probability; its parameters are not finite"
        )


def _limits(
    program: _Program, prompt_lengths_B: jax.Array | np.ndarray, rules: _Rules
) -> jax.Array:
    """Returns the most tokens of prompt and response."""
    return jnp.minimum(prompt_lengths_B + rules.max_new_tokens, program.length)


def _rooms(length: int, prompt_length: int) -> list[int]:
    """Returns the growing numbers of slots for responses: with few slots a token reads little."""
    # Responses to the longest prompts end here.
    least = length - prompt_length if length - prompt_length >= _ROOMS[0] else length
    return [*(slots for slots in _ROOMS if slots < least), *sorted({least, length})]


class _Cells(NamedTuple):
    """The rows that a device draws: cells of neighbours behind one prompt."""

    number: int
    width: int  # rows of a cell


def _levels(cells: _Cells, room: int) -> list[_Cells]:
    """Returns the cells that a device continues with as its rows end, beginning with all of
    them.
    """
    rows = cells.number * cells.width // 4
    if room < _LEAST_QUARTERED or not rows:
        return [cells]
    width = max(n for n in range(1, max(1, cells.width // 4) + 1) if cells.width % n == 0)
    return [cells, _Cells(rows // width, width)]


def _drawn(next_token: _NextToken, loop: _Loop, room: int, shards: int) -> _Loop:
    """Returns the state once all responses have ended or reached `room` tokens; ended rows cost few
    steps.
    """
    num_prompts, rows = loop.caches.num_prompts, loop.done_B.size
    levels = _levels(_Cells(num_prompts // shards, rows // num_prompts), room)
    for number, (cells, fewer) in enumerate(zip(levels, [*levels[1:], _Cells(0, 1)], strict=True)):

        def is_going_on(now: _Loop, cells: _Cells = cells, fewer: _Cells = fewer) -> jax.Array:
            starts_B = now.caches.starts_B
            assert starts_B is not None, "rows are behind their prompts"
            is_left_B = ~now.done_B & (now.lengths_B - starts_B <= room)
            left_SxC = is_left_B.reshape(shards, cells.number, cells.width).sum(axis=2)
            return jnp.any((-(-left_SxC // fewer.width)).sum(axis=1) > fewer.number)

        if number == 0:
            loop = jax.lax.while_loop(is_going_on, next_token, loop)
            continue
        some = _Some.of(loop.done_B, levels[0], cells, shards)
        part = jax.lax.while_loop(is_going_on, some.next_token(next_token), some.taken(loop))
        loop = some.put_back(loop, part)
    return loop


@dataclasses.dataclass(frozen=True, eq=False)
class _Some:
    """Some of the rows of each device, in cells of neighbours behind one prompt."""

    rows_SxR: jax.Array  # numbers among the rows of their device
    prompts_SxC: jax.Array  # of each cell, among the prompts of its device

    @classmethod
    def of(cls, done_B: jax.Array, whole: _Cells, cells: _Cells, shards: int) -> _Some:
        """Returns the unfinished rows, followed by others up to the size of the cells."""
        done_SxQxG = done_B.reshape(shards, whole.number, whole.width)
        order_SxQxG = (
            jnp.argsort(done_SxQxG, axis=2) + whole.width * jnp.arange(whole.number)[None, :, None]
        )
        rows_SxCxW = order_SxQxG.reshape(shards, -1, cells.width)
        done_SxC = jnp.take_along_axis(done_B.reshape(shards, -1), rows_SxCxW[:, :, 0], axis=1)
        first_SxC = jnp.argsort(done_SxC, axis=1)[:, : cells.number]
        rows_SxCxW = jnp.take_along_axis(rows_SxCxW, first_SxC[:, :, None], axis=1)
        return cls(rows_SxCxW.reshape(shards, -1), first_SxC // (whole.width // cells.width))

    def next_token(self, whole: _NextToken) -> _NextToken:
        """Returns the body of the loop for these rows."""
        keys_B, limits_B = (
            self._taken(x, 0, self.rows_SxR) for x in (whole.keys_B, whole.limits_B)
        )
        return dataclasses.replace(whole, keys_B=keys_B, limits_B=limits_B)

    def taken(self, loop: _Loop) -> _Loop:
        """Returns the state of these rows."""
        return _Loop(
            loop.caches.each(self._taken_cache),
            *(self._taken(x, 0, self.rows_SxR) for x in loop[1:]),
        )

    def _taken_cache(self, cache: Cache | StateCache) -> Cache | StateCache:
        if isinstance(cache, StateCache):
            states: StateCache = jax.tree.map(lambda x: self._taken(x, 1, self.rows_SxR), cache)
            return states
        keys, values, prompts, starts_B = cache
        assert prompts is not None, "rows are behind their prompts"
        shared = Cache(
            self._taken(prompts.keys_NxBxKxLxh, 1, self.prompts_SxC),
            self._taken(prompts.values_NxBxKxLxh, 1, self.prompts_SxC),
        )
        own_keys, own_values = (self._taken(x, 1, self.rows_SxR) for x in (keys, values))
        return Cache(own_keys, own_values, shared, self._taken(starts_B, 0, self.rows_SxR))

    def put_back(self, loop: _Loop, part: _Loop) -> _Loop:
        """Returns the state of all rows, with these rows updated."""
        caches = Caches(tuple(map(self._put_cache, loop.caches.places, part.caches.places)))
        return _Loop(
            caches, *(self._put(x, 0, new) for x, new in zip(loop[1:], part[1:], strict=True))
        )

    def _put_cache(self, cache: Cache | StateCache, part: Cache | StateCache) -> Cache | StateCache:
        if isinstance(cache, StateCache):
            assert isinstance(part, StateCache), "both are of one place"
            states: StateCache = jax.tree.map(lambda x, new: self._put(x, 1, new), cache, part)
            return states
        assert isinstance(part, Cache), "both are of one place"
        keys, values = (self._put(x, 1, new) for x, new in zip(cache[:2], part[:2], strict=True))
        return cache._replace(keys_NxBxKxLxh=keys, values_NxBxKxLxh=values)

    def _taken(self, x: Any, axis: int, numbers_SxR: jax.Array) -> Any:
        def taken(x: jax.Array, numbers_R: jax.Array) -> jax.Array:
            return jnp.take(x, numbers_R, axis=axis, mode="clip")

        return self._joined(
            jax.vmap(taken, (axis, 0), axis)(self._by_device(x, axis), numbers_SxR), axis
        )

    def _put(self, x: jax.Array, axis: int, new: jax.Array) -> jax.Array:
        def put(x: jax.Array, new: jax.Array, rows_R: jax.Array) -> jax.Array:
            return x.at[(slice(None),) * axis + (rows_R,)].set(new, unique_indices=True)

        whole, some = (self._by_device(array, axis) for array in (x, new))
        return self._joined(jax.vmap(put, (axis, axis, 0), axis)(whole, some, self.rows_SxR), axis)

    def _by_device(self, x: jax.Array, axis: int) -> jax.Array:
        return x.reshape(*x.shape[:axis], len(self.rows_SxR), -1, *x.shape[axis + 1 :])

    def _joined(self, x: jax.Array, axis: int) -> jax.Array:
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _prefilled(
    program: _Program,
    decoder: Decoder,
    prompts_RxP: jax.Array,
    lengths_R: jax.Array,
    limits_R: jax.Array,
    prompt_lengths_B: jax.Array,
    limits_B: jax.Array,
) -> _Loop:
    """Returns the state before the first token: the prompts in one pass, R of them for B rows."""
    rows, length = prompt_lengths_B.size, program.length
    slots_BxL = jax.lax.broadcasted_iota(jnp.int32, (rows, length), 1)
    tokens_BxP = jnp.repeat(prompts_RxP, rows // prompts_RxP.shape[0], axis=0)
    tokens_BxL = jnp.pad(tokens_BxP, ((0, 0), (0, length - prompts_RxP.shape[1])))
    tokens_BxL = jnp.where(slots_BxL < prompt_lengths_B[:, None], tokens_BxL, program.pad_id)
    tokens_BxL = decoder.constrain(tokens_BxL, ("batch", None))
    positions_RxP = jax.lax.broadcasted_iota(jnp.int32, prompts_RxP.shape, 1)
    num_rows, num_slots = prompts_RxP.shape
    # Without the last token, which each row reads again.
    empty = decoder.empty_caches(num_rows, num_slots, lengths_R - 1)
    _, caches = decoder.hidden_with_caches(prompts_RxP, positions_RxP, empty, limits_R)
    # A row reads its prompt's last token again, into its first slot, and draws the one after it.
    caches, logprobs_BxL = (
        caches.before(prompt_lengths_B - 1, 0),
        jnp.zeros(tokens_BxL.shape, jnp.float32),
    )
    return _Loop(caches, tokens_BxL, logprobs_BxL, prompt_lengths_B, prompt_lengths_B >= limits_B)


def _begin(
    program: _Program,
    params: State,
    prompts_BxP: np.ndarray,
    prompt_lengths_B: np.ndarray,
    limits_B: np.ndarray,
) -> _Loop:
    """Returns the state before the first token of responses that are drawn in pieces."""
    longest = max(1, int((limits_B - prompt_lengths_B).max()))
    slots = min(program.length, _power_of_two(longest))  # so that few programs serve all
    begun: _Loop = _begin_with(program, slots, params, prompts_BxP, prompt_lengths_B, limits_B)
    return begun


@partial(jax.jit, static_argnums=(0, 1))
def _begin_with(
    program: _Program,
    slots: int,
    params: State,
    prompts_BxP: jax.Array,
    prompt_lengths_B: jax.Array,
    limits_B: jax.Array,
) -> _Loop:
    decoder = _gathered(nnx.merge(program.graphdef, params))
    loop = _prefilled(
        program, decoder, prompts_BxP, prompt_lengths_B, limits_B, prompt_lengths_B, limits_B
    )
    return loop._replace(caches=loop.caches.with_room_for(slots))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _continue(
    program: _Program,
    params: State,
    loop: _Loop,
    draw_ids_Bx3: jax.Array,
    limits_B: jax.Array,
    rules: _Rules,
    tokens: jax.Array,
) -> _Loop:
    """Returns the state after `tokens` more tokens, or fewer if all responses end."""
    decoder = _gathered(nnx.merge(program.graphdef, params))
    next_token = _NextToken.of(program, decoder, draw_ids_Bx3, limits_B, rules)

    def is_going_on(carry: tuple[jax.Array, _Loop]) -> jax.Array:
        drawn, state = carry
        return (drawn < tokens) & jnp.any(~state.done_B)

    return jax.lax.while_loop(
        is_going_on, lambda carry: (carry[0] + 1, next_token(carry[1])), (jnp.int32(0), loop)
    )[1]


class _Loop(NamedTuple):
    """The state between two tokens."""

    caches: Caches
    tokens_BxL: jax.Array
    logprobs_BxL: jax.Array
    lengths_B: jax.Array  # of prompt and response so far
    done_B: jax.Array  # bool: the end was drawn, or the row is full


@dataclasses.dataclass(frozen=True, eq=False)
class _NextToken:
    """The body of the loop: reads each row's last token and draws the one after it."""

    program: _Program
    decoder: Decoder
    w_DxV: jax.Array
    keys_B: jax.Array
    limits_B: jax.Array
    rules: _Rules

    @classmethod
    def of(
        cls,
        program: _Program,
        decoder: Decoder,
        draw_ids_Bx3: jax.Array,
        limits_B: jax.Array,
        rules: _Rules,
    ) -> _NextToken:
        """Returns the body for a decoder whose weights are gathered."""
        w_DxV = decoder.output_projection().astype(decoder.dtype)
        return cls(program, decoder, w_DxV, _keys(rules.seed, draw_ids_Bx3), limits_B, rules)

    def __call__(self, loop: _Loop) -> _Loop:
        """Returns the state with one more token in each row that is not done."""
        last_Bx1 = loop.lengths_B[:, None] - 1
        token_Bx1 = jnp.take_along_axis(loop.tokens_BxL, last_Bx1, axis=1)
        x_Bx1xD, caches = self.decoder.hidden_with_caches(
            token_Bx1, last_Bx1, loop.caches, self.limits_B
        )
        logits_BxV = product(x_Bx1xD[:, 0], self.w_DxV, "bd,dv->bv", out_dtype=jnp.float32)
        logits_BxV = self.decoder.constrain(self.decoder.capped(logits_BxV), ("batch", None))
        drawn_B = self._draw(logits_BxV, jax.vmap(jax.random.fold_in)(self.keys_B, loop.lengths_B))
        logprobs_BxV = jax.nn.log_softmax(logits_BxV)
        logprob_Bx1 = jnp.take_along_axis(logprobs_BxV, drawn_B[:, None], axis=1)
        slots_BxL = jax.lax.broadcasted_iota(jnp.int32, loop.tokens_BxL.shape, 1)
        here_BxL = (slots_BxL == loop.lengths_B[:, None]) & ~loop.done_B[:, None]
        lengths_B = jnp.where(loop.done_B, loop.lengths_B, loop.lengths_B + 1)
        done_B = loop.done_B | (lengths_B >= self.limits_B)
        done_B |= self.rules.ends_V[drawn_B]
        tokens_BxL = jnp.where(here_BxL, drawn_B[:, None], loop.tokens_BxL)
        logprobs_BxL = jnp.where(here_BxL, logprob_Bx1, loop.logprobs_BxL)
        return _Loop(caches, tokens_BxL, logprobs_BxL, lengths_B, done_B)

    def _draw(self, logits_BxV: jax.Array, keys_B: jax.Array) -> jax.Array:
        rules = self.rules
        drawable_BxV = jnp.where(rules.drawable_V[None], logits_BxV, -jnp.inf)
        scaled_BxV = drawable_BxV / jnp.maximum(rules.temperature, _COOLEST)
        if self.program.truncates:
            scaled_BxV = keep_likeliest(scaled_BxV, rules.top_k, rules.nucleus_p)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BxV)
        return jnp.where(rules.temperature > 0, drawn_B, jnp.argmax(scaled_BxV, axis=1)).astype(
            jnp.int32
        )


def _gathered(decoder: Decoder) -> Decoder:
    """Returns the decoder with its weights in the compute dtype and whole, except along the tensor
    and expert axes.
    """

    def gathered(weight: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
        axes = weight.get_metadata("logical_axes")
        if any(name in axes for name in NORMS):  # computes in float32
            return weight
        value = weight.get_value()
        # a router computes in float32
        value = value if "router" in axes else value.astype(decoder.dtype)
        axes = tuple(None if name in STACKS else name for name in axes)
        if isinstance(value, Adapted):
            return weight.replace(
                dataclasses.replace(value, matrix=decoder.constrain(value.matrix, axes))
            )
        return weight.replace(decoder.constrain(value, axes))

    graphdef, params = nnx.split(decoder, nnx.Param)
    params = jax.tree.map(gathered, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graphdef, params)


def _keys(seed: jax.Array, draw_ids_Bx3: jax.Array) -> jax.Array:
    def folded(ids_3: jax.Array) -> jax.Array:
        return jax.lax.scan(
            lambda key, i: (jax.random.fold_in(key, i), None), jax.random.key(seed), ids_3
        )[0]

    return jax.vmap(folded)(draw_ids_Bx3)


def keep_likeliest(
    logits_BxV: jax.Array, top_k: jax.Array | int, nucleus_p: jax.Array | float
) -> jax.Array:
    """Returns the logits with -inf for all but the nucleus of the top k in [1, V]; ties with the
    last of them stay.

    The nucleus is the smallest set of likeliest tokens whose probabilities, among the top k, sum to
    at least p in (0, 1] (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751, section 3.1). The
    temperature divides the logits before.
    """
    sorted_BxV = jnp.sort(logits_BxV, axis=1, descending=True)
    among_k_BxV = jax.lax.broadcasted_iota(jnp.int32, sorted_BxV.shape, 1) < top_k
    probs_BxV = jax.nn.softmax(jnp.where(among_k_BxV, sorted_BxV, -jnp.inf), axis=1)
    before_BxV = jnp.cumsum(probs_BxV, axis=1) - probs_BxV
    kept_BxV = among_k_BxV & ((before_BxV < nucleus_p) | (nucleus_p >= 1))
    least_Bx1 = jnp.min(jnp.where(kept_BxV, sorted_BxV, jnp.inf), axis=1, keepdims=True)
    return jnp.where(logits_BxV >= least_Bx1, logits_BxV, -jnp.inf)
