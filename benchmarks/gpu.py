"""(o) One NVIDIA GPU: cuDNN's attention, the largest batch by `fit`, and an update beside the same
one by hand.

Each part that uses the GPU runs in its own process, one after the other, so that each has the whole
memory. `python -m benchmarks.gpu PART OUT.json ARGUMENT ...` is such a process. Without a GPU there
is nothing to measure.

Shapes: M rows, L length, D model, H query heads, K key heads, h head_dim, F mlp, V vocabulary.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import maxbatch
from benchmarks.commands import finish, metrics_of, start
from benchmarks.measurement import BenchmarkError, Measurement, ratio
from benchmarks.trainer import QUICK_MODEL, RUN
from maxbatch.config.loading import load_config
from maxbatch.model.attention import attend
from maxbatch.model.decoder import Decoder
from maxbatch.model.flops import model_flops_per_token
from maxbatch.model.scores import ScoreRules
from maxbatch.plan.program import Kernel
from maxbatch.system.hardware.chips import chip_of

BAR = 0.95
BUDGET_S = 480.0
ATTENTION_TOLERANCE = 0.02  # of the largest value; bfloat16 rounds by up to 0.004
LOSS_TOLERANCE = 0.01  # relative; the two sides round to bfloat16 in different places
_MEMORY_SHARE = 0.9  # of the GPU that JAX may allocate
_WARM_UP = 3  # updates that are not counted
# weights, Adam's moments and gradients in float32, and a copy in bfloat16 with its gradient
_BYTES_PER_PARAMETER = 20
_ROOM_BYTES = 8e9  # activations and logits

_SPEED = (
    "max_target_length=2048",
    "per_device_batch_size=4",
    "remat_policy=full",
    "rope_type=default",
)
_RATE = ("learning_rate=1e-4", "learning_rate_schedule=constant", "warmup_steps_fraction=0")
ONE_B = ("model_name=llama3.2-1b", *_SPEED)
SEVEN_B = ("model_name=llama2-7b", *_SPEED)
_EDGE = ("model_name=llama3.2-1b", "max_target_length=2048", "remat_policy=full")
_QUICK = (
    *QUICK_MODEL,
    "dtype=bfloat16",
    "per_device_batch_size=4",
    "remat_policy=full",
    "scan_layers=true",
)


class Gpu(NamedTuple):
    """The first GPU of this machine."""

    kind: str
    memory_bytes: int  # that JAX may allocate

    @property
    def peak_flops(self) -> float | None:
        """Floating-point operations per second in bfloat16; None for a GPU that is not in the
        table.
        """
        chip = chip_of(self.kind)
        return chip.tflops * 1e12 if chip else None


class Bench:
    """Processes on one platform ("cuda" or "cpu") that share a folder, a cache and a time limit."""

    def __init__(self, folder: Path, platform: str = "cuda") -> None:
        self.folder, self._platform = folder, platform
        self._end = time.monotonic() + BUDGET_S

    def run(self, name: str, module: str, *arguments: str, **variables: str) -> str:
        """Runs `python -m module arguments`; returns its output; raises BenchmarkError if it fails
        or is late.

        Prints the process's time when it ends, because the whole takes minutes.
        """
        log, began = self.folder / f"{name}.log", time.monotonic()
        variables |= {
            "JAX_PLATFORMS": self._platform,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(_MEMORY_SHARE),
        }
        process = start(module, *arguments, log=log, cache=self.folder / "cache", **variables)
        finish(process, log, max(1.0, self._end - began))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        return log.read_text(errors="replace")

    def part(self, name: str, *arguments: str) -> Any:
        """Runs a part of this module; returns its output."""
        output = self.folder / f"{name}.json"
        self.run(name, "benchmarks.gpu", name.partition(".")[0], str(output), *arguments)
        return json.loads(output.read_text())


def measure(quick: bool) -> list[Measurement]:
    """Returns the figures of this machine's GPU, and none without one."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        gpu = find_gpu(bench)
        if gpu is None:
            print("benchmarks: gpu: no GPU here")
            return []
        if quick:
            return [*attention(bench), *speed(bench, gpu, "tiny model", _QUICK, updates=5)]
        return [
            *attention(bench),
            *speed(bench, gpu, "1B", ONE_B),
            *speed(
                bench,
                gpu,
                "7B",
                (*SEVEN_B, f"base_num_decoder_layers={layers_that_fit(gpu.memory_bytes)}"),
            ),
            *fit_edge(bench),
        ]


def find_gpu(bench: Bench) -> Gpu | None:
    """Returns the first GPU, or None if JAX finds none."""
    try:
        return Gpu(**bench.part("probe"))
    except BenchmarkError:
        return None


def attention(bench: Bench) -> list[Measurement]:
    """Returns the difference between cuDNN's attention and the plain path, in values and in
    gradients.
    """
    differences = bench.part("attention", "cudnn")
    return [
        Measurement(f"attention, cuDNN against plain: {what}", value, bar=ATTENTION_TOLERANCE)
        for what, value in differences.items()
    ]


def attention_differences(
    implementation: Kernel, length: int = 1024, head_dim: int = 128
) -> dict[str, float]:
    """Returns the largest differences from the plain path in bfloat16, relative to its largest
    value.

    Rows hold three documents, 8 query heads share 2 key heads, and the batch is mapped as by the
    data axis.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    q_MxLxHxh, k_MxLxKxh, v_MxLxKxh, cotangent = (
        jax.random.normal(key, (2, length, heads, head_dim), jnp.bfloat16)
        for key, heads in zip(keys, (8, 2, 2, 8), strict=True)
    )
    segments_MxL = jnp.asarray(
        np.sort(np.random.default_rng(0).integers(1, 4, (2, length)), axis=1), jnp.int32
    )

    def outputs_of(which: Kernel, *inputs: jax.Array) -> Any:
        def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            one = jax.vmap(lambda q, k, v, s: attend(q, k, v, s, ScoreRules(implementation=which)))
            return one(q[:, None], k[:, None], v[:, None], segments_MxL[:, None])[:, 0]

        out, pull_back = jax.vjp(attended, *inputs)
        return {
            "values": out,
            **dict(zip(("query", "key", "value"), pull_back(cotangent), strict=True)),
        }

    compiled = jax.jit(outputs_of, static_argnums=0)
    inputs = (q_MxLxHxh, k_MxLxKxh, v_MxLxKxh)
    plain, other = (compiled(which, *inputs) for which in ("dot_product", implementation))
    names = {"values": "values"} | {
        name: f"gradient by the {name}" for name in ("query", "key", "value")
    }
    return {
        words: float(
            jnp.max(jnp.abs(_float(other[name]) - _float(plain[name])))
            / jnp.max(jnp.abs(_float(plain[name])))
        )
        for name, words in names.items()
    }


def _float(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32)


def fit_edge(bench: Bench, keys: Sequence[str] = _EDGE) -> list[Measurement]:
    """Checks that the batch that `fit` finds trains and that `compile` refuses the next one;
    returns the batch.

    Raises:
      BenchmarkError: the batch does not train, or the next one is not refused for its memory.
    """
    log = bench.run("fit", "maxbatch", "fit", *keys, "--json")
    found, _ = json.JSONDecoder().raw_decode(log[log.index("{\n") :])
    rows = found["per_device_batch_size"]
    run_dir = bench.folder / "edge"
    bench.run(
        "fits",
        "maxbatch",
        "train",
        *RUN,
        *keys,
        f"per_device_batch_size={rows}",
        "steps=3",
        f"run_dir={run_dir}",
    )
    more = (*keys, f"per_device_batch_size={rows + 1}", "steps=3", "dataset_type=synthetic")
    try:
        bench.run(
            "does-not-fit", "maxbatch", "compile", *more, "--output", str(bench.folder / "compiled")
        )
    except BenchmarkError as error:
        if "ended with 1:" not in str(error) or " per device of " not in str(error):
            raise
        detail = {
            key: found[key] for key in ("hbm_bytes_needed", "hbm_bytes_available", "next_size")
        }
        return [
            Measurement("fit: rows per device that train; one more is refused", rows, detail=detail)
        ]
    raise BenchmarkError(
        f"fit names {rows} rows per device the most that fit, and compile accepts {rows + 1}"
    )


def layers_that_fit(memory_bytes: int, keys: Sequence[str] = SEVEN_B) -> int:
    """Returns the most layers of a model whose state and gradients leave room for activations."""
    config = load_config(overrides=list(keys))
    width, heads = config.base_emb_dim, config.base_num_query_heads + config.base_num_kv_heads
    per_layer = width * (2 * heads * config.head_dim + 3 * config.base_mlp_dim)
    rest = 2 * config.vocab_size * width
    most = int((memory_bytes - _ROOM_BYTES) / _BYTES_PER_PARAMETER - rest) // per_layer
    return max(1, min(config.base_num_decoder_layers, most))


def speed(
    bench: Bench, gpu: Gpu, name: str, keys: Sequence[str], updates: int = 15
) -> list[Measurement]:
    """Returns tokens/s and MFU of `maxbatch train` and of the update by hand, and their ratio.

    Raises:
      BenchmarkError: the first updates have other losses by hand.
    """
    run_dir = bench.folder / f"{name.replace(' ', '-')}-run"
    stated = (*RUN, *keys, *_RATE, f"steps={updates}")
    bench.run(f"train.{name}", "maxbatch", "train", *stated, f"run_dir={run_dir}")
    records = metrics_of(run_dir)
    by_hand = bench.part(f"hand.{name}", *stated)
    check_losses([record["loss"] for record in records], by_hand["losses"])
    seconds = {
        "train": [record["step_time_s"] for record in records][_WARM_UP:],
        "by hand": by_hand["seconds"][_WARM_UP:],
    }
    config = load_config(overrides=list(stated))
    layers = config.base_num_decoder_layers
    tokens = config.per_device_batch_size * config.max_target_length
    flops = tokens * model_flops_per_token(config.decoder)
    figures = []
    for side, of_side in seconds.items():
        median = statistics.median(of_side)
        figures.append(Measurement(f"{name}, {layers} layers, {side}: tokens/s", tokens / median))
        if gpu.peak_flops:
            figures.append(
                Measurement(
                    f"{name}, {layers} layers, {side}: MFU", flops / median / gpu.peak_flops
                )
            )
    compared = ratio(
        f"{name}: tokens/s, train over by hand",
        seconds["by hand"],
        seconds["train"],
        bar=BAR,
        sense="at least",
    )
    return [*figures, compared]


def check_losses(ours: Sequence[float], by_hand: Sequence[float]) -> None:
    """Raises BenchmarkError if the first losses differ: times of different computations cannot be
    compared.
    """
    for step, (one, other) in enumerate(zip(ours[:_WARM_UP], by_hand[:_WARM_UP], strict=True), 1):
        if not math.isclose(one, other, rel_tol=LOSS_TOLERANCE):
            raise BenchmarkError(
                f"update {step}: the loss is {one} in the trainer and {other} by hand"
            )


def _train_by_hand(*keys: str) -> dict[str, list[float]]:
    """Returns seconds and loss of each update, in plain JAX and Optax, on the batches of the
    run.
    """
    config = load_config(overrides=list(keys))
    decoder = Decoder(config.decoder, rngs=nnx.Rngs(params=config.init_weights_seed))
    params = nnx.state(decoder, nnx.Param).to_pure_dict()
    del decoder
    is_matrix = jax.tree_util.tree_map_with_path(
        lambda path, _: "scale" not in jax.tree_util.keystr(path), params
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.gradient_clipping_threshold),
        optax.adamw(
            config.learning_rate,
            config.adam_b1,
            config.adam_b2,
            config.adam_eps,
            weight_decay=config.adam_weight_decay,
            mask=is_matrix,
        ),
    )
    opt_state = jax.jit(optimizer.init)(params)

    def update(params: Any, opt_state: Any, *rows: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(_loss)(params, config, *rows)
        changes, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, loss

    step = jax.jit(update, donate_argnums=(0, 1))
    seconds, losses = [], []
    with maxbatch.open_feed(config, maxbatch.make_mesh(config)) as feed:
        for batch in feed:
            began = time.perf_counter()
            params, opt_state, loss = step(
                params, opt_state, batch.tokens, batch.segments, batch.weights
            )
            losses.append(float(loss))
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "losses": losses}


def _loss(
    params: Any, config: Any, tokens_MxL: Any, segments_MxL: Any, weights_MxL: Any
) -> jax.Array:
    """Returns the token-weighted mean loss of a LLaMA without soft caps, windows or biases."""
    dtype, is_gpu = jnp.dtype(config.dtype), jax.default_backend() == "gpu"
    length, h = tokens_MxL.shape[1], config.head_dim
    angles = np.outer(np.arange(length), config.rope_max_timescale ** (-np.arange(0, h, 2) / h))[
        None, :, None, :
    ]
    cos, sin = (jnp.asarray(table, jnp.float32) for table in (np.cos(angles), np.sin(angles)))
    mask = (segments_MxL[:, :, None] == segments_MxL[:, None, :])[:, None]

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = _float(x)
        x = x * jax.lax.rsqrt(
            jnp.mean(x * x, axis=-1, keepdims=True) + config.normalization_layer_epsilon
        )
        return (x * scale).astype(dtype)

    def rotated(x: jax.Array) -> jax.Array:
        first, second = jnp.split(_float(x), 2, axis=-1)
        return jnp.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        ).astype(dtype)

    @jax.checkpoint
    def layer(x_MxLxD: jax.Array, own: Any) -> tuple[jax.Array, None]:
        own = jax.tree.map(lambda array: array.astype(dtype), own)
        y_MxLxD = normed(x_MxLxD, own["attention_norm"]["scale"])
        q, k, v = (
            jnp.einsum("mld,dnh->mlnh", y_MxLxD, own["attention"][name])
            for name in ("query", "key", "value")
        )
        attended = jax.nn.dot_product_attention(
            rotated(q),
            rotated(k),
            v,
            mask=mask,
            is_causal=True,
            implementation="cudnn" if is_gpu else "xla",
        )
        x_MxLxD = x_MxLxD + jnp.einsum("mlnh,nhd->mld", attended, own["attention"]["out"])
        y_MxLxD = normed(x_MxLxD, own["mlp_norm"]["scale"])
        inner_MxLxF = jax.nn.silu(y_MxLxD @ own["mlp"]["gate"]) * (y_MxLxD @ own["mlp"]["up"])
        return x_MxLxD + inner_MxLxF @ own["mlp"]["down"], None

    embedding_VxD = params["embedding"].astype(dtype)
    x_MxLxD, _ = jax.lax.scan(layer, embedding_VxD[tokens_MxL], params["layers"])
    x_MxLxD = normed(x_MxLxD, params["final_norm"]["scale"])
    output_DxV = embedding_VxD.T if config.logits_via_embedding else params["output"].astype(dtype)
    logits = jnp.einsum("mld,dv->mlv", x_MxLxD, output_DxV, preferred_element_type=jnp.float32)
    targets_MxL, weights_MxL = (jnp.roll(array, -1, axis=1) for array in (tokens_MxL, weights_MxL))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets_MxL)
    return jnp.sum(losses * weights_MxL) / jnp.sum(weights_MxL)


def _probe() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "kind": device.device_kind,
        "memory_bytes": (device.memory_stats() or {})["bytes_limit"],
    }


_PARTS = {"probe": _probe, "attention": attention_differences, "hand": _train_by_hand}

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_PARTS[sys.argv[1]](*sys.argv[3:])))
