"""`adamw_mask` states what does not decay, by paths here and in MaxText; null is what it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from maxbatch import load_config
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.optimizers import make_optimizer
from maxbatch.update.searched_paths import searched_paths

PARAMETERS = {
    "embedding": jnp.ones((4, 2)),
    "final_norm": {"scale": jnp.ones(2)},
    "layers": {
        "attention_norm": {"scale": jnp.ones((3, 2))},
        "attention": {"query": jnp.ones((3, 2, 2, 1))},
    },
}
NORMS = {"final_norm/scale", "layers/attention_norm/scale"}
MATRICES = {"embedding", "layers/attention/query"}


def decaying(*overrides: str) -> set[str]:
    """Returns the parameters that a zero gradient changes."""
    optimizer = make_optimizer(
        load_config(overrides=[*overrides]).optimizer, UpdateSettings(0.1, adam_weight_decay=0.1)
    )
    updates, _ = optimizer.update(
        optax.tree.zeros_like(PARAMETERS), optimizer.init(PARAMETERS), PARAMETERS
    )
    paths = jax.tree.leaves_with_path(updates)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in paths
        if jnp.any(leaf != 0)
    }


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("null", MATRICES),
        ("[]", MATRICES | NORMS),
        ("[decoder_norm]", MATRICES | NORMS - {"final_norm/scale"}),
        ("[layers/attention/, token_embedder]", NORMS),
        ("[self_attention/query/kernel$]", {"embedding"} | NORMS),
    ],
)
def test_what_a_pattern_finds_does_not_decay(mask: str, expected: set[str]) -> None:
    assert decaying(f"adamw_mask={mask}") == expected


def test_muons_matrices_have_a_decay_of_their_own() -> None:
    assert (
        decaying("opt_type=muon", "adamw_mask=[]", "muon_weight_decay=0") == {"embedding"} | NORMS
    )


@pytest.mark.parametrize(
    ("block", "path", "theirs"),
    [
        ("llama2", "layers.attention.query_bias", "decoder/layers/self_attention/query/bias"),
        ("llama2", "layers.mlp_norm.scale", "decoder/layers/post_self_attention_layer_norm/scale"),
        ("gemma2", "layers.1.mlp_norm.scale", "decoder/layers/pre_ffw_norm_global/scale"),
        (
            "gemma3",
            "layers.5.attention.query",
            "decoder/layers/layers_5/self_attention/query/kernel",
        ),
        (
            "gpt_oss",
            "layers.0.experts.expert_up_bias",
            "decoder/layers/layers_0/GptOssMlp/wi_1_bias",
        ),
        ("deepseek", "dense_layers.mlp.gate", "decoder/dense_layers/mlp/wi_0/kernel"),
        (
            "deepseek",
            "layers.experts.router",
            "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel",
        ),
        (
            "deepseek",
            "layers.attention.latent_norm.scale",
            "decoder/moe_layers/self_attention/kv_norm/scale",
        ),
        ("olmo3", "final_norm.scale", "decoder/decoder_norm/scale"),
    ],
)
def test_patterns_are_searched_in_the_names_of_maxtexts_family(
    block: str, path: str, theirs: str
) -> None:
    assert searched_paths(path.split("."), block) == [path.replace(".", "/"), theirs]


def test_a_parameter_of_an_own_model_is_searched_by_its_own_path() -> None:
    assert searched_paths(["blocks", "0", "weight"], "llama2") == ["blocks/0/weight"]


def test_a_mask_of_gemmas_names_is_no_mask_of_llamas() -> None:
    mask = "adamw_mask=[pre_self_attention_norm]"
    assert decaying(mask) == MATRICES | NORMS
    gemma = decaying(mask, "decoder_block=gemma3", "use_qk_norm=true", "logits_via_embedding=true")
    assert gemma == MATRICES | NORMS - {"layers/attention_norm/scale"}
