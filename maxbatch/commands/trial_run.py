"""`maxbatch train --try`: a few updates of a tiny model of the config's form, and the faults of its
data, at once.

The family and its features, the axes of the mesh, the form of the batch, the optimizer, the
schedule, precision and remat stay as in the config. Sizes, data, tokenizer and places are replaced.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from typing import Any, NamedTuple

from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.config.recipes import Recipe
from maxbatch.config.sections import KEYS
from maxbatch.config.values import value_text
from maxbatch.data.stream.faults import data_faults
from maxbatch.families.cycle import cycle_length
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.form import TinySizes
from maxbatch.plan.mesh_shape import AXES, BATCH_AXES, axis_key
from maxbatch.system.errors import EXIT_DONE, ConfigError

_STEPS = 4
_LENGTH, _HEAD, _WIDTH, _MLP, _VOCABULARY = 64, 16, 64, 128, 264
_HEADS = 4
_EXPERTS = 8
_MOST_PARTS = 8  # microbatches of a pipeline
_RECORDS = 200  # of the synthetic data
# Keys of sizes, places and outputs, which do not affect the form of a run.
_REPLACED: dict[str, object] = {
    "base_output_directory": "",
    "run_name": "",
    "model_name": "default",
    "load_parameters_path": "",
    "load_full_state_path": "",
    "lora_rank": 0,
    "steps": _STEPS,
    "train_samples": None,
    "train_tokens": None,
    "num_epochs": None,
    "max_target_length": _LENGTH,
    "base_emb_dim": _WIDTH,
    "base_num_query_heads": _HEADS,
    "head_dim": _HEAD,
    "base_mlp_dim": _MLP,
    "vocab_size": _VOCABULARY,
    "query_pre_attn_scalar": None,
    "dataset_type": "synthetic",
    "dataset_path": "",
    "synthetic_samples": _RECORDS,
    "eval_dataset_path": "",
    "tokenizer_type": "byte",
    "tokenizer_path": "",
    "grain_worker_count": 0,
    "expansion_factor_real_data": -1,
    "checkpoint_period": _STEPS // 2,
    "max_num_checkpoints_to_keep": 1,
    "eval_per_device_batch_size": None,
    "eval_steps": -1,
    "eval_samples": 8,
    "eval_tasks": "",
    "eval_tasks_limit": None,
    "log_to": "",
    "profile_steps": "",
    "generate_prompt": "",
    "compiled_dir": "",
    "libtpu_flags": "none",
}
# The most experts, their width and groups.
_MOST_OF_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "n_routing_groups": 4,
    "topk_routing_group": 2,
}


class TinyRun(NamedTuple):
    """A tiny run that has the form of another run."""

    keys: dict[str, Any]
    mesh: dict[str, int]  # sizes of the axes above 1

    def config(self, run_dir: str) -> Config:
        """Returns its config, with every key stated in the highest layer, above the environment."""
        values = self.keys | {"run_dir": run_dir}
        return load_config(overrides=[f"{name}={value_text(values[name])}" for name in KEYS])

    @property
    def num_devices(self) -> int:
        """CPU devices that it runs on."""
        return math.prod(self.mesh.values())


def make_trial(config: Config) -> TinyRun:
    """Returns a tiny run of the form of a config: each axis of its mesh that is not 1 has two
    devices.
    """
    sizes = {
        axis: 1 if config[axis_key("ici", axis)] == config[axis_key("dcn", axis)] == 1 else 2
        for axis in AXES
    }
    mesh = {axis: size for axis, size in sizes.items() if size > 1}
    texts = {recipe.key: False for recipe in Recipe.flagged()}  # synthetic data have no records
    keys = (
        config.to_dict()
        | _REPLACED
        | texts
        | _model_keys(config, sizes["pipeline"])
        | _batch_keys(config, sizes)
    )
    for axis, size in sizes.items():
        keys |= {axis_key("ici", axis): size, axis_key("dcn", axis): 1}
    has_held_out = bool(
        config.eval_dataset_path or config.eval_fraction or config.dataset_type == "python_stdlib"
    )
    keys["eval_fraction"] = 0.1 if has_held_out else 0
    keys["eval_interval"] = _STEPS // 2 if config.eval_interval > 0 else -1
    return TinyRun(keys, mesh)


def _model_keys(config: Config, stages: int) -> dict[str, object]:
    """Returns model sizes that suit its pattern of layers, its stages and the pairs of its
    heads.
    """
    pattern = len(config.attention_type.split(","))
    layers = math.lcm(pattern, cycle_length(config.model) * stages * config.num_pipeline_repeats)
    shared = config.base_num_query_heads // config.base_num_kv_heads
    kv_heads = {1: _HEADS, config.base_num_query_heads: 1}.get(shared, _HEADS // 2)
    has_experts = config.num_experts > 1
    names = ("rope_short_factors", "rope_long_factors")
    factors = {name: ",".join(str(config[name]).split(",")[: _HEAD // 2]) for name in names}
    dense = min(config.first_num_dense_layers, 1)
    tiny = TinySizes(_HEADS, _HEAD, _LENGTH, layers)
    of_forms: dict[str, object] = {}
    for form in FAMILIES[config.decoder_block].forms:
        of_forms |= form.small_keys(config, tiny)
    return {
        "base_num_decoder_layers": max(2, layers) + dense,
        "first_num_dense_layers": dense,
        "base_num_kv_heads": kv_heads,
        "global_num_kv_heads": kv_heads if config.global_num_kv_heads else 0,
        "num_experts": _EXPERTS if has_experts else 1,
        "num_experts_per_tok": min(config.num_experts_per_tok, _EXPERTS // 2),
        "base_moe_mlp_dim": _MLP // 4 if has_experts else -1,
        "sliding_window_size": min(config.sliding_window_size, _LENGTH // 2),
        "trainable_position_size": min(config.trainable_position_size, _LENGTH),
        **factors,
        **of_forms,
        **{name: min(int(config[name]), most) for name, most in _MOST_OF_EXPERTS.items()},
    }


def _batch_keys(config: Config, sizes: dict[str, int]) -> dict[str, object]:
    """Returns a small batch, stated in the same form as the config's: constant, a ramp or a
    schedule.
    """
    devices = math.prod(sizes.values())
    microbatches = config.num_pipeline_microbatches
    microbatches = microbatches if sizes["pipeline"] > 1 and 0 < microbatches <= _MOST_PARTS else -1
    rows = math.prod(sizes[axis] for axis in BATCH_AXES) * (
        abs(microbatches) * sizes["pipeline"] if microbatches < 0 else microbatches
    )
    passes = 1 if config.gradient_accumulation_steps == 1 else 2
    keys: dict[str, object] = {
        "per_device_batch_size": rows / devices,
        "gradient_accumulation_steps": passes,
        "global_batch_size": None,
        "batch_size_schedule": None,
        "enable_rampup_batch_size": False,
        "num_pipeline_microbatches": microbatches,
        "reference_batch_size": None,
    }
    batch = rows * passes
    if config.max_tokens_per_pass is not None:
        keys |= {
            "max_tokens_per_pass": -(-rows // devices) * _LENGTH,
            "per_device_batch_size": None,
            "gradient_accumulation_steps": None,
            "global_batch_size": 2 * batch,
        }
    elif config.enable_rampup_batch_size:
        keys |= {
            "enable_rampup_batch_size": True,
            "per_device_batch_size": 2 * rows / devices,
            "per_device_batch_size_start": rows / devices,
            "per_device_batch_size_increment": rows / devices,
            "global_rampup_samples": 2 * batch,
        }
    elif config.batch_size_schedule is not None:
        keys |= {
            "batch_size_schedule": f"0:{batch} {2 * batch}:{2 * batch}",
            "gradient_accumulation_steps": None,
        }
    return keys


def try_run(config: Config, trial: TinyRun) -> int:
    """Trains a tiny run in a folder that is removed, looks at the real data, and returns the exit
    code.

    Raises:
      ConfigError: names all faults of the data, of the tokenizer and of the tiny run.
    """
    mesh = " x ".join(f"{axis} {size}" for axis, size in trial.mesh.items()) or "1 device"
    print(
        f"trying {trial.keys['decoder_block']}: {trial.keys['base_num_decoder_layers']} layers of "
        f"width {_WIDTH}, mesh {mesh} on {trial.num_devices} CPU "
        f"device{'s' * (trial.num_devices > 1)}, {_STEPS} updates of synthetic data",
        flush=True,
    )
    faults = data_faults(config.stream)
    _train(trial, faults)
    if config.load_parameters_path or config.load_full_state_path:
        _open_parameters(config.load_parameters_path or config.load_full_state_path, faults)
    if faults:
        raise ConfigError("; ".join(faults))
    print(
        "the data, the tokenizer and the tiny run work; the size of the model and of the batch "
        "was not tried: maxbatch plan and maxbatch fit"
    )
    return EXIT_DONE


def _train(trial: TinyRun, faults: list[str]) -> None:
    import jax

    from maxbatch.run.pretraining import train

    with tempfile.TemporaryDirectory(prefix="maxbatch-try-") as folder:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = train(trial.config(f"{folder}/run"), jax.devices()[: trial.num_devices])
        except ConfigError as error:
            faults.append(f"the tiny run: {error}")
            return
        losses = [record["loss"] for record in outcome.history]
    print(
        f"{len(losses)} updates, loss {losses[0]:.3f} to {losses[-1]:.3f}; a checkpoint was saved "
        "and removed"
    )


def _open_parameters(path: str, faults: list[str]) -> None:
    from maxbatch.run.weights.parameters import open_source

    try:
        open_source(path)
    except ConfigError as error:
        faults.append(str(error))
