"""Responses: their log-probabilities as in training, and independence of layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.around.sampling import sampler
from maxbatch.around.sampling.sampler import (
    PromptRows,
    Responses,
    Sampler,
    SamplingRules,
    keep_likeliest,
)
from maxbatch.config.config import Config
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.model.decoder import Decoder
from maxbatch.parallel.mesh import make_mesh
from maxbatch.update.state import abstract_state, init_state
from tests.helpers.collectives import collectives
from tests.helpers.tiny import LENGTH, tiny_config

TOKENIZER = ByteTokenizer()
B, P = 6, 8


class Endless(ByteTokenizer):
    eos_id = None


def prompts(
    rows: Sequence[int] = range(B), behind: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts of 1 to P tokens, their lengths and the ids of their draws; `behind` lies behind
    each.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([1, P, 3, 5, P, 2], np.int32)
    tokens = rng.integers(0, 256, (B, P)).astype(np.int32)
    tokens = np.where(np.arange(P)[None] < lengths[:, None], tokens, behind)
    ids = np.stack([np.arange(B) // 2, np.zeros(B), np.arange(B) % 2], axis=1).astype(np.uint32)
    chosen = list(rows)
    return tokens[chosen], lengths[chosen], ids[chosen]


@cache
def model(*overrides: str) -> tuple[Config, nnx.State]:
    config = tiny_config(*overrides)
    return config, nnx.state(Decoder(config.decoder, rngs=nnx.Rngs(params=0)), nnx.Param)


def respond(config: Config, params: nnx.State, *inputs: Any, **options: Any) -> Responses:
    named = {
        field.name: options.pop(field.name)
        for field in fields(SamplingRules)
        if field.name in options
    }
    rules = SamplingRules(**{"temperature": 1.0, **named})
    options = {"tokenizer": TOKENIZER, "mesh": None, "prompt_length": P} | options
    return jax.device_get(
        Sampler(config.decoder, **options)(params, PromptRows(*(inputs or prompts())), rules)
    )


def tokens_that_count(responses: Responses) -> np.ndarray:
    """bool[B, L]: the response."""
    slots = np.arange(responses.tokens_BxL.shape[1])[None]
    return (slots >= responses.prompt_lengths_B[:, None]) & (slots < responses.lengths_B[:, None])


def training_logprobs(config: Config, params: nnx.State, responses: Responses) -> np.ndarray:
    """float32[B, L]: what a forward pass of training says of each token."""

    @jax.jit
    def forward(params: nnx.State, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        decoder = nnx.merge(nnx.graphdef(Decoder(config.decoder, rngs=nnx.Rngs(params=0))), params)
        x = decoder.hidden(tokens, segments).x_MxLxD
        w = decoder.output_projection().astype(x.dtype)
        logits = jnp.einsum("bld,dv->blv", x, w, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=2)[
            ..., 0
        ]

    segments = (np.arange(LENGTH)[None] < responses.lengths_B[:, None]).astype(np.int32)
    return np.pad(forward(params, responses.tokens_BxL, segments), ((0, 0), (1, 0)))


@pytest.mark.runs
@pytest.mark.parametrize(
    "overrides",
    [
        ("scan_layers=false", "logits_via_embedding=true"),
        ("scan_layers=true", "logits_via_embedding=false", "base_num_kv_heads=4"),
        (
            "decoder_block=gemma4_small",
            "base_num_decoder_layers=4",
            "num_kv_shared_layers=2",
            "scan_layers=true",
            "attention_type=local_sliding,global",
            "sliding_window_size=7",
        ),
    ],
)
def test_log_probabilities_are_those_of_the_forward_pass_of_training(
    overrides: tuple[str, ...],
) -> None:
    config, params = model(*overrides)
    responses = respond(config, params, tokenizer=Endless())
    counts = tokens_that_count(responses)
    assert counts.sum() == B * LENGTH - responses.prompt_lengths_B.sum()
    expected = training_logprobs(config, params, responses)
    np.testing.assert_allclose(responses.logprobs_BxL[counts], expected[counts], atol=1e-5)
    assert not responses.logprobs_BxL[~counts].any()


@pytest.mark.runs
@pytest.mark.usefixtures("standard_promotion")
def test_in_bfloat16_log_probabilities_are_those_of_a_training_pass_within_2e_3() -> None:
    config, params = model("dtype=bfloat16")
    params = jax.tree.map(lambda x: x, params)
    for norm in (
        params["layers"]["attention_norm"],
        params["layers"]["mlp_norm"],
        params["final_norm"],
    ):
        shape = norm["scale"].shape  # scales that bfloat16 does not have
        norm["scale"][...] = 1 + 0.5 * jax.random.normal(jax.random.key(0), shape)
    responses = respond(config, params, tokenizer=Endless())
    counts = tokens_that_count(responses)
    differences = np.abs(responses.logprobs_BxL - training_logprobs(config, params, responses))
    assert differences[counts].max() < 2e-3
    assert not responses.logprobs_BxL[~counts].any()


MESHES = {
    "2 devices, fsdp": (2, ()),
    "4 devices, data x fsdp": (4, ("ici_data_parallelism=2",)),
    "4 devices, tensor": (4, ("ici_tensor_parallelism=4",)),
    "8 devices, tensor x fsdp x pipeline": (
        8,
        (
            "ici_tensor_parallelism=2",
            "ici_pipeline_parallelism=2",
            "num_pipeline_microbatches=2",
            "scan_layers=true",
        ),
    ),
}


@cache
def on_one_device() -> Responses:
    config, params = model()
    return respond(config, params, tokenizer=Endless())


@pytest.mark.runs
@pytest.mark.parametrize("mesh_name", MESHES)
def test_responses_are_the_same_on_any_mesh(mesh_name: str) -> None:
    num_devices, overrides = MESHES[mesh_name]
    config = tiny_config(*overrides)
    mesh = make_mesh(config, jax.devices()[:num_devices])
    params = init_state(config.update, abstract_state(config.update, mesh)).params
    responses = respond(config, params, tokenizer=Endless(), mesh=mesh)
    np.testing.assert_array_equal(responses.tokens_BxL, on_one_device().tokens_BxL)
    np.testing.assert_allclose(responses.logprobs_BxL, on_one_device().logprobs_BxL, atol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_prompt_that_is_read_once_for_its_responses_has_the_same_ones(num_devices: int) -> None:
    config = tiny_config()
    mesh = make_mesh(config, jax.devices()[:num_devices]) if num_devices > 1 else None
    params = model()[1]
    tokens_3xP, lengths_3, _ = prompts(range(3))
    draw_ids_6x3 = np.stack([np.arange(6) // 2, np.zeros(6), np.arange(6) % 2], axis=1).astype(
        np.uint32
    )
    alone = respond(
        config, params, np.repeat(tokens_3xP, 2, 0), np.repeat(lengths_3, 2, 0), draw_ids_6x3
    )
    shared = respond(config, params, tokens_3xP, lengths_3, draw_ids_6x3, mesh=mesh)
    np.testing.assert_array_equal(shared.tokens_BxL, alone.tokens_BxL)
    np.testing.assert_array_equal(shared.prompt_lengths_B, alone.prompt_lengths_B)
    np.testing.assert_allclose(shared.logprobs_BxL, alone.logprobs_BxL, atol=1e-5)


@pytest.mark.processes
def test_ended_rows_of_groups_cost_few_steps_and_leave_the_other_responses_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config("max_target_length=72", "base_num_decoder_layers=1")
    params = nnx.state(Decoder(config.decoder, rngs=nnx.Rngs(params=0)), nnx.Param)
    tokens_4xP, lengths_4, _ = prompts(range(4))
    draw_ids_32x3 = np.stack([np.arange(32) // 8, np.zeros(32), np.arange(32) % 8], axis=1).astype(
        np.uint32
    )
    inputs = config, params, tokens_4xP, lengths_4, draw_ids_32x3
    a_sixteenth = tuple(range(16))  # of the tokens ends a response
    draw, rows_drawn = sampler._NextToken.__call__, list[int]()

    def counting(next_token: Any, loop: Any) -> Any:
        jax.debug.callback(lambda: rows_drawn.append(loop.done_B.size))
        return draw(next_token, loop)

    with monkeypatch.context() as patched:
        patched.setattr(sampler._NextToken, "__call__", counting)
        patched.setattr(sampler, "_LEAST_QUARTERED", 64)
        compacted = respond(*inputs, end_ids=a_sixteenth)
        jax.effects_barrier()
        patched.setattr(sampler, "_LEAST_QUARTERED", 256)
        sampler.jit_responses.clear_cache()
        in_vain = len(rows_drawn)
        plain = respond(*inputs, end_ids=a_sixteenth)
        jax.effects_barrier()
    np.testing.assert_array_equal(compacted.tokens_BxL, plain.tokens_BxL)
    np.testing.assert_allclose(compacted.logprobs_BxL, plain.logprobs_BxL, atol=1e-5)
    steps = int((plain.lengths_B - plain.prompt_lengths_B).max())
    assert in_vain == steps and sum(rows_drawn[steps:]) == 32 * steps
    assert sum(rows_drawn[:steps]) < 0.7 * 32 * steps, rows_drawn
    sampler.jit_responses.clear_cache()
    monkeypatch.setattr(sampler, "_LEAST_QUARTERED", 64)
    on_two = respond(*inputs, end_ids=a_sixteenth, mesh=make_mesh(config, jax.devices()[:2]))
    np.testing.assert_array_equal(on_two.tokens_BxL, plain.tokens_BxL)


def test_devices_that_share_rows_tell_each_other_of_a_token_only_whether_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config("ici_data_parallelism=2", "ici_fsdp_parallelism=2")
    mesh = make_mesh(config, jax.devices()[:4])
    monkeypatch.setattr(sampler, "jit_responses", sampler.jit_responses.lower)
    sampled = Sampler(config.decoder, TOKENIZER, mesh, prompt_length=P)
    lowered: Any = sampled(
        abstract_state(config.update, mesh).params,
        sampled.rows([[0]] * 8, np.zeros((8, 3))),
        SamplingRules(),
    )
    found = collectives(lowered.compile().as_text(), dict(mesh.shape), trips=2)
    every_token = [c for c in found if c.times > 1]
    weights = [c for c in found if c.times == 1]
    assert sum(c.num_bytes for c in every_token) <= 1
    assert {c.kind for c in weights} >= {"all-gather"}


def test_a_row_has_the_same_response_in_any_batch() -> None:
    config, params = model()
    parts = [
        respond(config, params, *prompts(rows), tokenizer=Endless())
        for rows in ([3], [5, 0, 4, 2], [1])
    ]
    for field, whole in on_one_device()._asdict().items():
        joined = np.concatenate([getattr(part, field) for part in parts])[[2, 5, 4, 0, 3, 1]]
        np.testing.assert_allclose(joined, whole, atol=1e-5)


def test_what_lies_behind_a_prompt_does_not_matter() -> None:
    config, params = model()
    behind = respond(config, params, *prompts(behind=7), tokenizer=Endless())
    np.testing.assert_array_equal(behind.tokens_BxL, on_one_device().tokens_BxL)


def test_draws_depend_on_the_seed_and_on_each_of_the_three_ids() -> None:
    config, params = model()
    tokens, lengths, _ = prompts([1] * B)
    ids = np.array(
        [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [2**32 - 1, 0, 0], [0, 0, 0]], np.uint32
    )
    first, other = (
        respond(config, params, tokens, lengths, ids, seed=seed).tokens_BxL.tolist()
        for seed in (0, 1)
    )
    assert first[0] == first[5]
    assert len({tuple(row) for row in first + other}) == 10


def test_temperature_zero_takes_the_likeliest_whatever_the_key() -> None:
    config, params = model()
    tokens, lengths, ids = prompts([2] * B)
    ids[:, 0] = np.arange(B)
    greedy = respond(config, params, tokens, lengths, ids, temperature=0.0, tokenizer=Endless())
    assert (greedy.tokens_BxL == greedy.tokens_BxL[0]).all()


def test_a_response_ends_with_its_end_token_or_its_limit() -> None:
    config, params = model()
    eos_often = jax.tree.map(lambda x: x, params)
    eos_often["embedding"][...] = params["embedding"][...].at[TOKENIZER.eos_id].multiply(3.0)
    tokens, lengths, ids = prompts([0, 1, 2, 3, 4, 5] * 4)
    ids[:, 1] = np.arange(len(ids))
    responses = respond(config, eos_often, tokens, lengths, ids, max_new_tokens=12)
    ends, new = responses.lengths_B, responses.lengths_B - responses.prompt_lengths_B
    ended = responses.tokens_BxL[np.arange(len(ids)), ends - 1] == TOKENIZER.eos_id
    assert 0 < ended.sum() < len(ids)
    assert (new[~ended] == 12).all() and (new >= 1).all() and (new <= 12).all()
    inside = tokens_that_count(responses)
    before_last = inside & (np.arange(LENGTH)[None] < ends[:, None] - 1)
    assert not (responses.tokens_BxL[before_last] == TOKENIZER.eos_id).any()
    assert (responses.logprobs_BxL[inside] < 0).all()
    behind = np.arange(LENGTH)[None] >= ends[:, None]
    assert (responses.tokens_BxL[behind] == TOKENIZER.pad_id).all()
    assert not responses.logprobs_BxL[behind].any()
    for row, prompt in enumerate(tokens):
        np.testing.assert_array_equal(
            responses.tokens_BxL[row, : lengths[row]], prompt[: lengths[row]]
        )


def test_a_full_row_has_no_response() -> None:
    config, params = model()
    full = np.full((2, LENGTH), 65, np.int32)
    ids = np.zeros((2, 3), np.uint32)
    responses = respond(
        config, params, full, np.array([LENGTH, LENGTH - 1], np.int32), ids, prompt_length=LENGTH
    )
    np.testing.assert_array_equal(responses.lengths_B, [LENGTH, LENGTH])
    assert responses.logprobs_BxL[1, -1] < 0 and not responses.logprobs_BxL[:, :-1].any()


def test_draws_follow_the_probabilities_at_the_temperature() -> None:
    config, params = model("max_target_length=2", "base_num_decoder_layers=1")
    rows, temperature = 20_000, 0.7
    ids = np.zeros((rows, 3), np.uint32)
    ids[:, 0] = np.arange(rows)
    ones = np.ones((rows, 1), np.int32)
    responses = respond(
        config, params, ones, ones[:, 0], ids, prompt_length=1, temperature=temperature
    )
    drawn = responses.tokens_BxL[:, 1]
    logprobs = np.zeros(256)
    logprobs[drawn[drawn < 256]] = responses.logprobs_BxL[drawn < 256, 1]
    frequent = np.unique(drawn[drawn < 256], return_counts=True)
    likely = frequent[0][frequent[1] > 200]
    counts = frequent[1][frequent[1] > 200]
    # Odds between two tokens are those of their log-probabilities, divided by the temperature.
    odds = (logprobs[likely] - logprobs[likely[0]]) / temperature
    np.testing.assert_allclose(np.log(counts / counts[0]), odds, atol=5 * math.sqrt(2 / 200))
    assert len(likely) > 10 and np.ptp(odds) > 0.5


def reference_cut(logits: np.ndarray, top_k: int, nucleus_p: float) -> set[int]:
    """Holtzman et al. 2020, section 3.1, token by token."""
    order = np.argsort(-logits)[:top_k]
    probabilities = np.exp(logits[order]) / np.exp(logits[order]).sum()
    kept, mass = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        kept.add(int(token))
        mass += probability
        if mass >= nucleus_p:
            break
    return kept


@pytest.mark.parametrize(
    ("top_k", "nucleus_p"), [(1, 1.0), (5, 1.0), (40, 0.3), (40, 0.9), (7, 0.8), (40, 1e-6)]
)
def test_top_k_and_nucleus_keep_what_their_definitions_say(top_k: int, nucleus_p: float) -> None:
    logits = np.random.default_rng(1).normal(0, 2, (3, 40)).astype(np.float32)
    logits[1, ::3] = -np.inf  # ids that are never drawn
    kept = np.isfinite(keep_likeliest(jnp.asarray(logits), top_k, nucleus_p))
    for row in range(3):
        expected = reference_cut(logits[row], top_k, nucleus_p)
        assert set(np.flatnonzero(kept[row])) == {
            i for i in expected if np.isfinite(logits[row, i])
        }


def test_prompts_of_another_width_are_refused() -> None:
    config, params = model()
    with pytest.raises(ValueError, match="8 slots, made for 9"):
        respond(config, params, prompt_length=9)
    with pytest.raises(ValueError, match="prompt_length=33 must be in"):
        Sampler(config.decoder, TOKENIZER, None, prompt_length=LENGTH + 1)
