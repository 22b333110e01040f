"""Attention and experts of a width of their own (qwen3_custom_moe): the layer, its cache, its
counts, its refusals.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch import ConfigError
from maxbatch.config.matrices import active_model_size, model_size
from maxbatch.huggingface.folder.config_export import config_json
from maxbatch.model.decoder import Decoder
from maxbatch.model.flops import model_flops_per_token
from tests.helpers.configs import works_of
from tests.helpers.tiny import tiny_config

LENGTH = 12
NARROW = (
    "decoder_block=qwen3_custom_moe",
    "attention_output_dim=12",
    "num_experts=4",
    "num_experts_per_tok=2",
    "base_moe_mlp_dim=16",
    "norm_topk_prob=true",
    "use_qk_norm=true",
    f"max_target_length={LENGTH}",
)
TOKENS_1xL = np.random.default_rng(0).integers(0, 256, (1, LENGTH))


def decoder_of(*overrides: str) -> Decoder:
    decoder = Decoder(tiny_config(*NARROW, *overrides).decoder, rngs=nnx.Rngs(params=0))
    rng = np.random.default_rng(1)
    for _, parameter in nnx.iter_graph(decoder):
        if isinstance(parameter, nnx.Param):  # no scale stays 1
            parameter[...] += jnp.asarray(
                0.1 * rng.standard_normal(parameter[...].shape), jnp.float32
            )
    return decoder


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def turned(x_LxHxh: np.ndarray) -> np.ndarray:
    half = x_LxHxh.shape[-1] // 2
    angles = np.outer(np.arange(x_LxHxh.shape[0]), 10000.0 ** (-np.arange(half) / half))[:, None]
    first, second = x_LxHxh[..., :half], x_LxHxh[..., half:]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ],
        axis=-1,
    )


def layer(x_LxD: np.ndarray, of: nnx.State, number: int) -> np.ndarray:
    """Returns MaxText's layer in NumPy: x + up(experts(norm(attention(norm(x)))))."""

    def at(*names: str) -> np.ndarray:
        found = of
        for name in names:
            found = found[name]
        return np.asarray(found[...], np.float64)[number]

    inner = normed(x_LxD, at("attention_norm", "scale"))
    q, k, v = (
        np.einsum("ld,dnh->lnh", inner, at("attention", name)) for name in ("query", "key", "value")
    )
    q = turned(normed(q, at("attention", "query_norm", "scale")))
    k = turned(normed(k, at("attention", "key_norm", "scale")))
    k, v = (np.repeat(array, q.shape[1] // k.shape[1], axis=1) for array in (k, v))
    scores = np.einsum("qnh,lnh->nql", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    attended = np.einsum("nql,lnh->qnh", softmax(scores), v)
    latent = normed(
        np.einsum("lnh,nhe->le", attended, at("attention", "out")), at("mlp_norm", "scale")
    )
    chances = softmax(latent @ at("experts", "router"))
    out = np.zeros_like(latent)
    for token, row in enumerate(chances):
        best = np.argsort(-row)[:2]
        for expert in best:
            gate = latent[token] @ at("experts", "expert_gate")[expert]
            up = latent[token] @ at("experts", "expert_up")[expert]
            down = (gate / (1 + np.exp(-gate)) * up) @ at("experts", "expert_down")[expert]
            out[token] += row[expert] / row[best].sum() * down
    return x_LxD + out @ at("widen")


@pytest.mark.runs
def test_the_layers_and_their_cache_are_those_of_maxtext() -> None:
    decoder = decoder_of("scan_layers=true")
    x_LxD = np.asarray(decoder.embedding[...], np.float64)[TOKENS_1xL[0]]
    for number in range(2):
        x_LxD = layer(x_LxD, nnx.state(decoder.layers), number)
    expected = normed(x_LxD, np.asarray(decoder.final_norm.scale[...]))
    graphdef, params = nnx.split(decoder)
    tokens = jnp.asarray(TOKENS_1xL, jnp.int32)

    @jax.jit
    def both(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        decoder = nnx.merge(graphdef, params)
        cached, _ = decoder.hidden_with_caches(
            tokens, jnp.arange(LENGTH)[None], decoder.empty_caches(1, LENGTH)
        )
        return decoder.hidden(tokens, jnp.ones_like(tokens)).x_MxLxD, cached

    for found in both(params):
        np.testing.assert_allclose(found[0], expected, atol=1e-4)


def test_parameters_and_flops_are_those_of_its_widths() -> None:
    config = tiny_config(*NARROW, "logits_via_embedding=false").decoder
    expert, attention = 3 * 12 * 16, 32 * (4 + 2 + 2) * 8 + 4 * 8 * 12
    vectors = 32 + 2 * 8 + 12
    matrices = attention + 12 * 4 + 12 * 32  # with the router and the last projection
    assert model_size(config) == 2 * (matrices + 4 * expert + vectors) + 2 * 264 * 32 + 32
    assert active_model_size(config) == 2 * (matrices + 2 * expert + vectors) + 2 * 264 * 32 + 32
    flops = 6 * (2 * (matrices + 2 * expert) + 264 * 32) + 2 * 6 * LENGTH * 4 * 8
    assert model_flops_per_token(config) == flops


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ("attention_output_dim=-1",),
            "attention_output_dim=-1: must be a width other than base_emb_dim=32 beside",
        ),
        (
            ("attention_output_dim=32",),
            "attention_output_dim=32: must be a width other than base_emb_dim=32 beside",
        ),
        (("decoder_block=qwen3_moe",), r"which lacks it \(only in qwen3_custom_moe\)"),
    ],
)
def test_a_width_without_a_projection_is_refused(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_config(*NARROW, *keys)
    tiny_config(*NARROW, *keys, *works_of(str(caught.value), keys[0].partition("=")[0]))


def test_a_family_of_maxtext_alone_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="decoder_block=qwen3_custom_moe: Hugging Face's transformers have no such",
    ):
        config_json(tiny_config(*NARROW).decoder, "float32", {})
