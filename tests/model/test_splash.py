"""Splash attention against the plain path, on a mesh of CPU devices; and the values of
`attention`.
"""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch import ConfigError
from maxbatch.config.config import Config
from maxbatch.model.attention import Attention, attend, choose_implementation
from maxbatch.model.scores import ScoreRules
from maxbatch.model.splash import block_size, splash_attend
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.remat import Remat, checkpointed
from maxbatch.parallel.sharding import activation_constraint, unconstrained
from maxbatch.update.state import abstract_state
from maxbatch.update.step import abstract_settings, make_train_step
from tests.helpers.tiny import tiny_config

M, L, H, HEAD_DIM = 2, 256, 4, 16


def chosen_on(platform: str, config: Config) -> str:
    return choose_implementation(config.decoder, platform, make_mesh(config).shape["context"])


@pytest.mark.runs
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("axes", "strategy", "kv_heads", "dtype", "tolerance"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}, 2, "float32", 2e-5),
        ({"data": 2, "tensor": 4}, {}, 2, "float32", 2e-5),  # a key head for two devices: repeated
        (
            {"data": 2, "fsdp": 2, "context": 2},
            {},
            1,
            "float32",
            2e-5,
        ),  # keys gathered over the length
        ({"data": 2, "context": 2, "tensor": 2}, {"is_balanced": True}, 2, "float32", 2e-5),
        ({"data": 2, "context": 2, "tensor": 2}, {"strategy": "ulysses"}, 2, "float32", 2e-5),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}, 2, "bfloat16", 3e-2),
    ],
    ids=str,
)
def test_splash_equals_the_plain_path_in_value_and_gradient(
    axes: dict[str, int], strategy: dict[str, Any], kv_heads: int, dtype: str, tolerance: float
) -> None:
    """Packed, grouped, inside `jax.vmap(..., spmd_axis_name="data")` as the train step has it."""
    stated = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | axes
    config = tiny_config(
        f"max_target_length={L}", *(f"ici_{axis}_parallelism={n}" for axis, n in stated.items())
    )
    constrain = activation_constraint(make_mesh(config), ("fsdp",))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, M, L, heads, HEAD_DIM), jnp.float32).astype(dtype)
        for key, heads in zip(keys, (H, kv_heads, kv_heads), strict=True)
    )
    rows = [[1] * 100 + [2] * 90 + [0] * 66, [1] * 256, [1] * 128 + [2] * 128, [1] * 3 + [2] * 253]
    segments = jnp.asarray(np.array(rows, np.int32).reshape(2, M, L))

    def value_and_output(splash: bool, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        rules = ScoreRules(implementation="splash", **strategy)
        output = attend(*arrays, rules, constrain) if splash else attend(*arrays)
        return jnp.sum(jnp.sin(output.astype(jnp.float32))), output

    def gradient(splash: bool) -> Any:
        def one_part(*arrays: jax.Array) -> Any:
            return jax.grad(lambda *a: value_and_output(splash, *a), (0, 1, 2), has_aux=True)(
                *arrays
            )

        return jax.jit(jax.vmap(one_part, spmd_axis_name="data"))(q, k, v, segments)

    got, expected = gradient(True), gradient(False)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype == dtype
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    ("policy", "forward_kernels"), [("minimal", 2), ("minimal_with_context", 1)]
)
def test_the_forward_kernel_runs_again_unless_its_sums_are_kept_and_both_backward_ones_read_them_once(
    policy: str, forward_kernels: int
) -> None:
    config = tiny_config(f"max_target_length={L}", f"remat_policy={policy}")
    constrain = activation_constraint(make_mesh(config), ("fsdp",))
    q = jnp.ones((8, L, H, HEAD_DIM))
    segments = jnp.ones((8, L), jnp.int32)

    def total(q: jax.Array) -> jax.Array:
        layer = checkpointed(
            lambda q: splash_attend(q, q, q, segments, constrain), Remat.of(config.remat), True
        )
        return jnp.sum(jnp.sin(layer(q)))

    jaxpr = str(jax.make_jaxpr(jax.grad(total))(q))
    assert jaxpr.count("name=splash_mha_fwd") == forward_kernels
    assert jaxpr.count("optimization_barrier") == 1


@pytest.mark.parametrize(
    ("length", "block"), [(128, 128), (384, 384), (640, 128), (2048, 512), (4096, 512)]
)
def test_blocks_follow_the_length(length: int, block: int) -> None:
    assert block_size(length) == block


@pytest.mark.parametrize(
    ("platform", "overrides", "chosen"),
    [
        ("tpu", ("max_target_length=256",), "splash"),
        ("tpu", ("max_target_length=200",), "dot_product"),
        ("tpu", ("max_target_length=256", "ici_context_parallelism=4"), "dot_product"),
        (
            "tpu",
            (
                "max_target_length=512",
                "ici_context_parallelism=4",
                "context_parallel_strategy=ring",
                "decoder_block=gpt_oss",
                "num_experts=4",
                "norm_topk_prob=true",
            ),
            "splash",
        ),
        ("gpu", ("dtype=bfloat16",), "cudnn"),
        ("gpu", ("dtype=float32",), "dot_product"),
        ("gpu", ("dtype=bfloat16", "head_dim=256"), "dot_product"),
        ("gpu", ("dtype=bfloat16", "ici_context_parallelism=2"), "dot_product"),
        ("cpu", ("dtype=bfloat16", "max_target_length=256"), "dot_product"),
        ("tpu", ("max_target_length=256", "attention=dot_product"), "dot_product"),
    ],
)
def test_auto_takes_what_the_devices_of_the_mesh_can_run(
    platform: str, overrides: tuple[str, ...], chosen: str
) -> None:
    config = tiny_config(*overrides)
    assert chosen_on(platform, config) == chosen


@pytest.mark.parametrize(
    ("platform", "overrides", "reason"),
    [
        ("cpu", ("attention=splash", "max_target_length=256"), "TPU"),
        (
            "tpu",
            ("attention=splash", "max_target_length=200"),
            "max_target_length=200 divisible by 128",
        ),
        (
            "tpu",
            ("attention=splash", "max_target_length=256", "ici_context_parallelism=4"),
            "128 x 4 context",
        ),
        ("cpu", ("attention=cudnn", "dtype=bfloat16"), "GPU"),
        ("gpu", ("attention=cudnn",), "dtype=bfloat16"),
        ("gpu", ("attention=cudnn", "dtype=bfloat16", "head_dim=12"), "head_dim=12"),
        (
            "gpu",
            ("attention=cudnn", "dtype=bfloat16", "max_target_length=33"),
            "max_target_length=33 even",
        ),
    ],
)
def test_a_stated_choice_that_cannot_run_is_refused_with_what_works(
    platform: str, overrides: tuple[str, ...], reason: str
) -> None:
    config = tiny_config(*overrides)
    with pytest.raises(ConfigError, match=re.escape(reason)) as refusal:
        chosen_on(platform, config)
    message = str(refusal.value)
    assert message.startswith(overrides[0]) and "\n" not in message
    works = re.search(r"works: (\S+)", message)
    assert works
    config = tiny_config(*overrides, works[1])
    assert chosen_on(platform, config) in message


def test_the_train_step_refuses_it_before_anything_compiles() -> None:
    config = tiny_config("attention=splash")
    mesh = make_mesh(config)
    with pytest.raises(ConfigError, match="attention=splash"):
        make_train_step(config.update, mesh, abstract_state(config.update, mesh))


def test_a_look_at_a_model_runs_anywhere_whatever_it_was_trained_with() -> None:
    config = tiny_config("attention=splash", "max_target_length=256")
    keys = config.decoder
    attention = nnx.eval_shape(
        lambda: Attention(keys, "layers.attention", rngs=nnx.Rngs(0), constrain=unconstrained)
    )
    assert attention.implementation == "dot_product"


# libtpu looks for a TPU in these variables; the values only keep it from looking further.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.fixture
def devices_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install libtpu")
    from jax.experimental import topologies

    for name, value in NO_TPU.items():
        if name not in os.environ:
            monkeypatch.setenv(name, value)
    return lambda name: list(
        topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    )


# Windows in every second layer, and both soft caps.
GEMMA = (
    "decoder_block=gemma2 attention_type=local_sliding,global sliding_window_size=200 "
    "attn_logits_soft_cap=50 final_logits_soft_cap=30"
)
# A cycle of two layers, whose heads have the widths of Gemma 4's, and one key of the global layer
# for both shards.
GEMMA4 = (
    "decoder_block=gemma4 base_num_decoder_layers=2 attention_type=local_sliding,global "
    "sliding_window_size=200 head_dim=256 global_num_kv_heads=1 query_pre_attn_scalar=1"
)


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "overrides"),
    [
        ("v5e:2x2", f"{GEMMA} ici_data_parallelism=2 ici_tensor_parallelism=2"),
        ("v5p:2x2x1", f"{GEMMA} ici_context_parallelism=2 scan_layers=false"),
        (
            "v5p:2x2x1",
            f"{GEMMA} ici_context_parallelism=2 context_parallel_strategy=ring "
            "context_parallel_load_balance=true",
        ),
        ("v5e:2x2", f"{GEMMA4} ici_data_parallelism=2 ici_tensor_parallelism=2"),
        ("v5e:2x2", "ici_data_parallelism=2 ici_pipeline_parallelism=2"),
    ],
)
def test_a_decoder_compiles_for_tpus_forward_and_backward_with_splash(
    devices_of: Any, topology: str, overrides: str
) -> None:
    from maxbatch.data.feed.placement import Batch

    config = tiny_config(
        "dtype=bfloat16",
        "base_emb_dim=256",
        "base_num_query_heads=4",
        "base_num_kv_heads=2",
        "head_dim=64",
        "base_mlp_dim=512",
        "max_target_length=512",
        "remat_policy=full",
        "scan_layers=true",
        *overrides.split(),
    )
    mesh = make_mesh(config, devices_of(topology))
    abstract = abstract_state(config.update, mesh)
    rows = (1, 8, 512)
    batch = Batch(*(jax.ShapeDtypeStruct(rows, dtype) for dtype in ("int32", "int32", "float32")))
    scalars = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
    compiled = (
        make_train_step(config.update, mesh, abstract).lower(abstract, batch, *scalars).compile()
    )
    kernels = re.findall(r'custom_call_target="tpu_custom_call"', compiled.as_text())
    assert len(kernels) >= 3, "forward, its recomputation or backward in queries, backward in keys"
