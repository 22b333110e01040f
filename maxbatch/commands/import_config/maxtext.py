"""MaxText's configs and recipes: its defaults, its models, and the words whose values differ from ours.

Facts from MaxText's documentation and `configs/base.yml` (https://github.com/AI-Hypercomputer/maxtext).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from maxbatch.commands.import_config.maxtext_data import translate_data
from maxbatch.commands.import_config.maxtext_defaults import (
    BASE,
    file_of_module,
    follows,
    is_default,
    is_known,
    values_of,
    words_of_model,
)
from maxbatch.commands.import_config.maxtext_model import MODEL_CHOICES, PRESET_DIFFERENCES, translate_form
from maxbatch.commands.import_config.maxtext_rl import is_rl, translate_rl
from maxbatch.commands.import_config.prompts import without_balance
from maxbatch.commands.import_config.reading import is_yaml, read_yaml
from maxbatch.commands.import_config.shell import (
    UNSET,
    config_file_of,
    is_config_file,
    program_of,
    read_line,
    settings_of,
)
from maxbatch.commands.import_config.steps import take_orbax
from maxbatch.commands.import_config.translation import Displaced, NameOfFile, Stated, Translation
from maxbatch.config.keys import Fixes
from maxbatch.config.loading import configs_dir, keys
from maxbatch.config.matrices import KEPT_OF_EXPERTS
from maxbatch.config.sections import REMAT_TENSORS, names_fixing
from maxbatch.config.values import NULLS, shown, shown_path
from maxbatch.plan.mesh_shape import AXES, axis_key
from maxbatch.system.errors import ConfigError

# MaxText's defaults of unstated keys, without which the batch, the length and the rates would differ.
DEFAULTS = {
    "per_device_batch_size": "12.0", "gradient_accumulation_steps": "1", "expansion_factor_real_data": "-1",
    "steps": "150001", "max_target_length": "2048", "learning_rate": "3e-5", "lr_schedule_type": "cosine",
    "warmup_steps_fraction": "0.1", "learning_rate_final_fraction": "0.1", "wsd_decay_steps_fraction": "0.1",
    "opt_type": "adamw", "adam_b1": "0.9", "adam_b2": "0.95", "adam_eps": "1e-8", "adam_weight_decay": "0.1",
    "gradient_clipping_threshold": "1.0", "dtype": "bfloat16", "weight_dtype": "float32", "remat_policy": "full",
    "scan_layers": "true", "dcn_data_parallelism": "-1", "ici_fsdp_parallelism": "-1", "packing": "true",
    "enable_data_shuffling": "true", "data_shuffle_seed": "0", "init_weights_seed": "0", "dataset_type": "synthetic",
    "eval_interval": "-1", "eval_steps": "-1", "checkpoint_period": "10000", "log_period": "100",
    "max_num_checkpoints_to_keep": "null", "add_bos": "true", "add_eos": "true",
}  # fmt: skip
RAMP_DEFAULTS = {
    "per_device_batch_size_start": "4.0", "per_device_batch_size_increment": "2.0", "global_rampup_samples": "500",
}  # fmt: skip
MODEL_DEFAULTS = {
    "base_emb_dim": "2048", "base_num_query_heads": "16", "base_num_kv_heads": "16", "base_mlp_dim": "7168",
    "base_num_decoder_layers": "16", "head_dim": "128", "vocab_size": "32000", "logits_via_embedding": "false",
    "normalization_layer_epsilon": "1e-5", "rope_max_timescale": "10000",
}  # fmt: skip
_BATCH_DIMENSIONS = ("emb_dim", "num_query_heads", "num_kv_heads", "mlp_dim", "num_decoder_layers")
_MOST_BASES = 8
_BLOCKS = ("rl", "lora", "dpo")  # words of them are read without the block's name as well
_RETIRED = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}
# Its policies by name that are lists of tensors, with where each is kept.
_QKV = ("query_proj", "key_proj", "value_proj")
_AS_CUSTOM = {
    "save_dot_with_context_except_mlp": dict.fromkeys((*_QKV, "context", "out_proj"), "device"),
    "save_dot_except_mlpwi": dict.fromkeys((*_QKV, "out_proj", "mlpwo"), "device"),
    "save_dot_except_mlp": dict.fromkeys((*_QKV, "out_proj"), "device"),
    "qkv_proj_offloaded": dict.fromkeys(_QKV, "offload"),
    "minimal_offloaded": dict.fromkeys((*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"), "offload"),
}


def read(path: Path, command: int | None = None) -> tuple[dict[str, Stated], list[str]]:
    """Returns the words of a config with its `base_config` chain and its model, or of a recipe; and notes on them.

    As in MaxText, a model's own keys go before those of a config file, and a command's before both.

    Args:
      path: the file.
      command: which of a recipe's commands, from 1 on; None: the only one.
    """
    notes: list[str] = []
    named, own = None, dict[str, Stated]()
    if is_yaml(path):
        words = _chain(path) if path.name != BASE else dict(read_yaml(path))
    else:
        line = read_line(path, command)
        if len(files := [word for word in line if is_config_file(word)]) > 1:
            both = " and ".join(map(shown, files[:2]))
            raise ConfigError(f"{shown_path(path)}: a command has the words of {both}, and one config comes out")
        own = settings_of([word.lstrip("-") if "=" in word else word for word in line], shown_path(path))
        own = {name: _as_list(name, value) for name, value in own.items() if name not in ("m", "c")}
        named = config_file_of(line)
        if bare := ", ".join(unset[1] for word in line if (unset := UNSET.fullmatch(word))):
            notes.append(f"{shown_path(path)} does not set {bare}, which may hold words of the command: none are read")
        words, note = _words_of_file(path, named, program_of(path, command), "per_device_batch_size" in own)
        notes += [note] if note else []
        words = {word: value for word, value in words.items() if not _is_stated(word, own)}
    name = str((words | own).get("model_name", "default")).strip()
    if name in ("", "default"):
        return words | own, notes
    if name in _presets():
        words = _below_model(words, name)
    else:
        folders = [path.parent, *([Path(named).parent] if named and Path(named).is_absolute() else [])]
        plain = name.replace("-Instruct", "")
        model = next(filter(None, (_near(folder, f"models/{plain}.yml") for folder in folders)), None)
        if model is None:
            return words | own, notes
        if model.resolve() != path.resolve():
            words |= read_yaml(model)
        own["model_name"] = NameOfFile(name)
        notes.append(f"model_name={name}: its keys are those of {shown_path(model)}")
    return words | own, notes


def _is_stated(word: str, own: Mapping[str, Stated]) -> bool:
    """Returns whether a command states a word of its file, with or without the name of the word's block."""
    return word in own or any(
        word == f"{block}.{name}" or name == f"{block}.{word}" for block in _BLOCKS for name in own
    )


def _as_list(name: str, value: Stated) -> Stated:
    """Returns the list that a text of a command states, as MaxText reads it: `[a, b]`, or `('a', 'b')` of columns."""
    text = value.strip() if isinstance(value, str) else ""
    is_tuple = text.startswith("(") and text.endswith(")") and name.endswith("_columns")
    if not is_tuple and not (text.startswith("[") and text.endswith("]")):
        return value
    items = re.findall(r"""'([^']*)'|"([^"]*)"|([^\s,'"][^,'"]*)""", text[1:-1])
    return [single or double or bare.strip() for single, double, bare in items]


def _words_of_file(path: Path, named: str | None, program: str, is_alone: bool) -> tuple[dict[str, Stated], str]:
    """Returns the words of the config file that a command reads, and a note on where they are from.

    Args:
      path: the recipe.
      named: the file that its command names; None: that of the program, which MaxText then reads.
      program: the module or the path that the command runs.
      is_alone: whether the command may be read without its file, since it states the batch itself.
    """
    if named is None:
        file = file_of_module(program)
        note = (
            f"{program} reads MaxText's {file} where no file is named: its values as of 0.2.5" if file != BASE else ""
        )
        return dict(values_of(file) or {}), note
    place = Path(os.path.expanduser(named))
    if place.is_absolute() and os.path.isfile(place):
        return _of_base(place) if place.name == BASE else _chain(place), ""
    if Path(named).name == BASE:
        return {}, ""  # which holds MaxText's defaults
    beside, note = _named(path.parent, named, is_alone and file_of_module(program) == BASE)
    return _chain(beside) if beside else dict(values_of(named) or {}), note


def _of_base(path: Path) -> dict[str, Stated]:
    """Returns the words of a base.yml whose values are not MaxText's defaults."""
    return {word: value for word, value in read_yaml(path).items() if is_known(word) and not is_default(word, value)}


def _below_model(words: dict[str, Stated], name: str) -> dict[str, Stated]:
    """Returns the words of a config file beside a model, whose own file goes first."""
    form, of_model = names_fixing(Fixes.FORM), words_of_model(name)
    return {
        word: Displaced(value if isinstance(value, str) else json.dumps(value))
        if word in of_model or (word in form and is_default(word, value))
        else value
        for word, value in words.items()
    }


def _presets() -> set[str]:
    return {path.stem for path in (configs_dir() / "models").glob("*.yml")}


def _near(folder: Path, name: str) -> Path | None:
    """Returns a file of MaxText's configs in a folder or in one above it, or None."""
    for above in [folder, *folder.resolve().parents][:8]:
        for tried in (above / name, above / "configs" / name, above / "src" / "maxtext" / "configs" / name):
            if os.path.isfile(tried):  # False for a name that no file can have
                return tried
    return None


def _named(folder: Path, named: str, is_alone: bool) -> tuple[Path | None, str]:
    """Returns the config file that a command names, None if there is none, and a note on where its words are from.

    Raises:
      ConfigError: there is none, its values are unknown, and they may state the task, the model or the batch: it is one
        of MaxText's own (below `configs`), or the command does not stand alone.
    """
    beside = _near(folder, re.sub(r"^.*configs/+|^\W*", "", named))
    if beside is not None:
        return beside, ""
    configs = next((above for above in folder.resolve().parents if above.name == "configs"), None)
    found = sorted(configs.glob(f"*/**/{Path(named).name}")) if configs else []
    if len(found) == 1:
        return found[0], f"{shown_path(named)} is not there: {shown_path(found[0])} is read, the only one of that name"
    absent = f"{shown_path(named)} is not beside {shown_path(folder)}"
    if values_of(named) is not None:
        return None, f"{absent}: its values are MaxText's as of 0.2.5"
    if is_alone and "configs/" not in named:
        return None, f"{absent}: only the command's own words are read"
    states = "states the task, the model or the batch"
    raise ConfigError(f"{absent.replace(' is', ': is', 1)}, and {states}; works: put it there")


def _chain(path: Path) -> dict[str, Stated]:
    """Returns the words of a file over those of its bases; of MaxText's base.yml only what differs is of interest."""
    words: dict[str, Stated] = {}
    seen: list[Path] = []
    at: Path | None = path
    while at is not None:
        if len(seen) == _MOST_BASES:
            raise ConfigError(f"base_config={shown_path(at)}: a chain has at most {_MOST_BASES} files")
        if at.resolve() in seen:
            raise ConfigError(f"base_config={shown_path(at)}: must not lead back to a file of its own chain")
        seen.append(at.resolve())
        stated = read_yaml(at) if at.name != BASE else _of_base(at)
        base = stated.pop("base_config", "")
        words = stated | words
        name = base if isinstance(base, str) and base.lower() not in NULLS else ""
        at = _near(path.parent, name) if name else None
        if name and at is None and Path(name).name != BASE:  # whose values are known
            raise ConfigError(f"base_config={shown(name)}: is not beside {shown_path(path)}; works: put it there")
    return words


def translate(t: Translation) -> None:
    """Takes the words whose values differ from ours; the table of words covers the others."""
    t.excuse(is_default)
    if "num_target_devices" in t:  # a config as MaxText has resolved it
        for word in filter(follows, t.left()):
            t.ignore(word, "it follows from the others")
    _retired(t)
    if t.number("eval_interval") == 0:
        t.map("eval_interval", "0 is never, as -1 is", eval_interval="-1")
    is_of_prompts = is_rl(t)
    if is_of_prompts:
        translate_rl(t)
    _run(t)
    _model(t)
    if is_of_prompts:
        without_balance(t)
    _program(t)
    _mesh(t)
    _adapters(t)
    _checkpoints(t)
    _preferences(t)
    _distillation(t)
    if not is_of_prompts:
        translate_data(t)
        _batch(t)


def _retired(t: Translation) -> None:
    """Takes retired spellings as today's words."""
    for old, new in _RETIRED.items():
        if old in t:
            t.rename(old, new)


def _run(t: Translation) -> None:
    folder, name = (t.text(word) if "$" not in t.text(word) else "" for word in ("base_output_directory", "run_name"))
    for word in ("base_output_directory", "run_name"):
        if word in t and "$" in t.text(word):
            t.ignore(word, "its variable is not set in the file; run_dir is the folder of the run")
    if folder and "base_output_directory" in t:
        t.map("base_output_directory", run_dir=f"{folder.rstrip('/')}/{name}" if name else folder)
    if name and "run_name" in t:
        t.map("run_name", run_dir=t.settings.get("run_dir", name if "/" in name else f"runs/{name}"))
    if t.text("lr_schedule_type") not in keys()["learning_rate_schedule"].choices:
        t.refuse("lr_schedule_type", "cosine, wsd or constant")
    if t.text("learning_rate_schedule_steps") in ("-1", t.text("steps")):
        t.ignore("learning_rate_schedule_steps", "the schedule ends with the run")
    if t.text("wsd_decay_style") == "linear":
        t.ignore("wsd_decay_style", "wsd decays linearly")
    optimizer = t.text("opt_type")
    if optimizer == "adam_pax":
        t.map("opt_type", "Adam with decoupled decay, in another form", opt_type="adamw")
    for word in ("abort_on_nan_loss", "abort_on_inf_loss"):
        if t.is_true(word) and word in t:
            t.map(word, "the run ends at the first update that is not finite", max_consecutive_skips="1")
        elif word in t:
            t.ignore(word, "an update that is not finite is skipped")
    first, count = t.number("skip_first_n_steps_for_profiler"), t.number("profiler_steps")
    for word in ("profiler", "skip_first_n_steps_for_profiler", "profiler_steps"):
        if word not in t:
            continue
        if t.text("profiler") in ("xplane", "nsys"):
            start = int(first if first is not None else 1)
            t.map(word, profile_steps=f"{start}:{start + int(count or 5)}")
        else:
            t.ignore(word, "no profile is asked for")


def _model(t: Translation) -> None:
    name = t.text("model_name")
    is_preset = name in _presets()
    if is_preset:
        differing = PRESET_DIFFERENCES.get(name, {})
        t.map("model_name", "our preset of these dimensions", model_name=name, **differing)
    elif name in ("", "default") or t.is_read("model_name"):
        if "model_name" in t:
            t.ignore("model_name", "the model's keys say it")
    else:
        why = f"no preset {shown(name)}; needed: its file models/{shown(name)}.yml beside this one"
        t.refuse("model_name", why, is_essential=True)
    if not is_preset:
        for word, default in MODEL_DEFAULTS.items():
            if word not in t:
                t.settings.setdefault(word, default)
        _scale(t)
    elif t.text("global_parameter_scale") not in ("", "1", "0"):
        t.refuse("global_parameter_scale", "state the dimensions themselves", is_essential=True)
    if "global_parameter_scale" in t and t.text("global_parameter_scale") in ("1", "0"):
        t.ignore("global_parameter_scale", "1 says nothing")
    for word in _BATCH_DIMENSIONS:
        if word in t:
            t.ignore(word, f"base_{word} says it")
    translate_form(t, is_preset)


def _scale(t: Translation) -> None:
    """Takes the factor of all dimensions: powers of 2 in turn for heads and MLP, for the width, and for the layers."""
    scale = t.number("global_parameter_scale") or 1.0
    if scale <= 1:
        return
    if not scale.is_integer() or int(scale) & (int(scale) - 1):
        t.refuse("global_parameter_scale", "a power of 2", is_essential=True)
        return
    each, rest = divmod(int(scale).bit_length() - 1, 3)
    heads, width = each + (rest > 0), each + (rest > 1)
    powers = {"base_emb_dim": width, "base_num_query_heads": heads, "base_num_kv_heads": heads, "base_mlp_dim": heads,
              "base_num_decoder_layers": each}  # fmt: skip
    scaled: dict[str, str] = {}
    for word, power in powers.items():
        number = t.number(word) if word in t else float(MODEL_DEFAULTS[word])
        if number is None or not number.is_integer():
            t.refuse(word, "a whole number", is_essential=True)
            return
        scaled[word] = str(int(number) << power)
        if word in t:
            t.map(word, f"x {1 << power} by global_parameter_scale", **{word: scaled[word]})
    t.map("global_parameter_scale", **scaled)


def _is_dense(t: Translation) -> bool:
    return (t.number("num_experts") or 1) <= 1 and t.text("model_name") not in MODEL_CHOICES


def _mesh(t: Translation) -> None:
    """Takes the axes that MaxText has beside ours and that split the same things as one of ours."""
    same = {"fsdp": ("fsdp_transpose", *(["expert"] if _is_dense(t) else [])), "tensor": ("tensor_sequence",)}
    for net in ("ici", "dcn"):
        for axis, beside in same.items():
            ours = axis_key(net, axis)
            words = [word for word in (axis_key(net, other) for other in beside) if (t.number(word) or 1) != 1]
            sizes = [t.number(word) or 1 for word in (ours, *words)]
            if words:
                size = -1 if -1 in sizes else math.prod(sizes)
                for word in (ours, *words):
                    if word in t or word != ours:
                        t.map(word, " x ".join((ours, *words)), **{ours: f"{size:g}"})
    others = [axis_key("dcn", axis) for axis in AXES if axis != "data"]
    if "-1" in [t.settings.get(word, t.text(word)) for word in others] and "dcn_data_parallelism" not in t:
        t.drop("dcn_data_parallelism")


def _adapters(t: Translation) -> None:
    """Takes LoRA, nested below `lora` or not."""
    words = [word for word in t.left() if word.startswith(("lora.", "lora_"))]
    for word in words:
        if word.startswith("lora."):
            t.rename(word, word.removeprefix("lora."))
    if not t.is_true("enable_lora"):
        for word in [word for word in t.left() if word.startswith("lora_") or word == "enable_lora"]:
            t.ignore(word, "enable_lora=false")
        return
    t.map("enable_lora", lora_rank=t.text("lora_rank"))
    for word in ("lora_rank", "lora_alpha"):
        t.map(word, **{word: t.text(word)})
    named = {"query": "query", "key": "key", "value": "value", "out": "out", "wi_0": "gate", "wi_1": "up", "wo": "down"}
    path = t.text("lora_module_path")
    found = [ours for there, ours in named.items() if re.search(rf"(?<![a-z]){there}(?![a-z0-9])", path)]
    if "lora_module_path" in t and not found:
        t.refuse("lora_module_path", f"a pattern of {', '.join(named)}", is_essential=True)
    else:
        t.map("lora_module_path", lora_targets=",".join(found) if 0 < len(found) < len(named) else "all")
    is_dense = "the parameters below adapters have weight_dtype, not 8 or 4 bits"
    reasons = {
        "lora_restore_path": "adapters start anew: saved ones are not read",
        "lora_weight_qtype": is_dense, "lora_tile_size": is_dense,
    }  # fmt: skip
    for word, why in reasons.items():
        if word in t:
            t.refuse(word, why, is_essential=True)
        elif t.is_left(word):
            t.ignore(word, "null says nothing")


def _preferences(t: Translation) -> None:
    """Takes the words of preference pairs, which MaxText nests in `dpo`."""
    for word in t.left():
        if word.startswith("dpo.") and word not in ("dpo.algo", "dpo.max_prompt_length"):
            t.rename(word, word.removeprefix("dpo."))
    if not t.is_true("use_dpo"):
        for word in t.left():
            if word.startswith("dpo.") or word in ("dpo_beta", "dpo_label_smoothing", "orpo_lambda"):
                t.ignore(word, "use_dpo=false")
        return
    t.map("use_dpo", "a batch counts pairs, as there", use_dpo="true")
    if "dpo.algo" in t:
        t.map("dpo.algo", dpo_algo=t.text("dpo.algo"))
    if "dpo.max_prompt_length" in t:
        t.refuse("dpo.max_prompt_length", "null: prompt and answer together have max_target_length tokens")
    elif t.is_left("dpo.max_prompt_length"):
        t.ignore("dpo.max_prompt_length", "null says nothing")


def _checkpoints(t: Translation) -> None:
    if "load_parameters_path" in t:
        take_orbax(t, "load_parameters_path")
    if "load_full_state_path" in t:
        why = "MaxText's optimizer state is not read; its parameters are, by load_parameters_path"
        t.refuse("load_full_state_path", why, is_essential=True)


def _distillation(t: Translation) -> None:
    others = ("student_overrides.", "teacher_overrides.")
    is_one = any(word.startswith(others) for word in t.left())
    for word in t.left():
        if word.startswith((*others, "distill_")):
            if is_one:
                t.refuse(word, "no distillation: a model is trained on tokens, not on another model", is_essential=True)
            else:
                t.ignore(word, "no teacher is stated, so nothing is distilled")


def _program(t: Translation) -> None:
    for word in ("dtype", "weight_dtype"):
        if t.text(word) not in ("float32", "bfloat16"):
            t.refuse(word, "float32 or bfloat16")
    if t.text("grad_dtype") == "float32":
        t.ignore("grad_dtype", "gradients accumulate in float32")
    if "mu_dtype" in t and t.text("mu_dtype") == t.text("weight_dtype"):
        t.ignore("mu_dtype", "moments have the dtype of the parameters")
    if "remove_size_one_mesh_axis_from_type" in t:
        t.ignore("remove_size_one_mesh_axis_from_type", "how its arrays are typed; the update is the same")
    _remat(t)
    attention = t.text("attention")
    if attention and attention not in ("dot_product",):
        t.map("attention", "the kernel that the devices have", attention="auto")
    stages = [t.number(f"{net}_pipeline_parallelism") or 1 for net in ("ici", "dcn")]
    if t.text("num_pipeline_repeats") in ("-1", "") and stages[0] * stages[1] <= 1:
        if "num_pipeline_repeats" in t:
            t.ignore("num_pipeline_repeats", "there is no pipeline")
    elif t.text("num_pipeline_repeats") in ("-1", ""):
        layers = t.number("base_num_decoder_layers") or _preset_layers(t.text("model_name"))
        each = int(stages[0] * stages[1] * (t.number("num_layers_per_pipeline_stage") or 1))
        t.map("num_pipeline_repeats", "layers / (stages x layers of a stage)", num_pipeline_repeats=str(layers // each))
    if "num_layers_per_pipeline_stage" in t:
        t.ignore("num_layers_per_pipeline_stage", "num_pipeline_repeats says it")
    if "compiled_trainstep_file" in t:
        t.ignore(
            "compiled_trainstep_file", "a file of its programs; maxbatch compile writes others, which train the same"
        )


def _remat(t: Translation) -> None:
    policy = t.text("remat_policy")
    tensors = _AS_CUSTOM.get(policy)
    if tensors is not None:
        t.map("remat_policy", "the tensors that it keeps", remat_policy="custom", **tensors)
    elif policy in ("minimal_flash", "minimal_with_context_and_quantization"):
        t.map("remat_policy", "the same without its other name", remat_policy="minimal_with_context")
    elif policy not in keys()["remat_policy"].choices:
        ours = "minimal" if policy.startswith("minimal") else "full"
        t.map("remat_policy", "the nearest policy; the update is the same", remat_policy=ours)
    for word in REMAT_TENSORS:
        if word in t and policy != "custom":
            t.ignore(word, f"it is read with remat_policy=custom, not with {shown(policy)}")
        elif word in t and word in KEPT_OF_EXPERTS and _is_dense(t):
            t.ignore(word, "the model has no experts")
    if "qkv_proj" in t and policy == "custom" and t.is_true("fused_qkv"):
        t.map("qkv_proj", "ours are three products", **dict.fromkeys(_QKV, t.text("qkv_proj")))
        for word in _QKV:
            if word in t:
                t.ignore(word, "with fused_qkv=true it is qkv_proj that is read")
    elif "qkv_proj" in t:
        t.ignore("qkv_proj", "it is read with remat_policy=custom and fused_qkv=true")
    if policy == "custom" and t.text("decoder_layer_input") == "remat":
        t.map("decoder_layer_input", "nothing comes before it in a layer", decoder_layer_input="device")


def _preset_layers(name: str) -> int:
    from maxbatch.config.loading import load_config

    return int(load_config(overrides=[f"model_name={name}"] if name in _presets() else []).base_num_decoder_layers)


def _batch(t: Translation) -> None:
    if t.is_true("enable_rampup_batch_size"):
        g = t.number("gradient_accumulation_steps") or 1
        code = f"; its code leaves out the {g:g} accumulation steps while it ramps" if g > 1 else ""
        why = f"stage i begins at i x samples_per_increment; its code restarts the count at every stage{code}"
        t.map("enable_rampup_batch_size", why, enable_rampup_batch_size="true")
        for word, default in RAMP_DEFAULTS.items():
            text = t.text(word, default)
            t.map(word, **{word: text.removesuffix(".0") if word == "global_rampup_samples" else text})
    else:
        for word in RAMP_DEFAULTS:
            if word in t:
                t.ignore(word, "enable_rampup_batch_size is false")
    if t.is_true("use_tunix_gradient_accumulation") and (t.number("gradient_accumulation_steps") or 1) > 1:
        why = "its loss is then the mean of the passes' means; here it is the mean over all tokens"
        t.map("gradient_accumulation_steps", why, gradient_accumulation_steps=t.text("gradient_accumulation_steps"))
    p = t.number("per_device_batch_size")
    if p is not None and 0 < p < 1:
        why = "its code loads a row per device and trains on the share"
        t.map("per_device_batch_size", why, per_device_batch_size=t.text("per_device_batch_size"))
    e = t.number("expansion_factor_real_data")
    if e is not None and 0 < e < 1:
        why = "the full batch is trained on; its code may train the share"
        t.map("expansion_factor_real_data", why, expansion_factor_real_data=t.text("expansion_factor_real_data"))
    for word in ("tokenize_train_data", "tokenize_eval_data"):
        if t.is_true(word):
            t.ignore(word, "data are text")
    if "num_epoch" in t:
        t.ignore("num_epoch", "steps sets the length; epochs follow one another without a gap")


def equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in MaxText's words and in ours."""
    if "batch_size" in t.settings:
        prompts, answers = t.settings["batch_size"], t.settings.get("num_generations", "num_generations")
        return (f"effective batch = batch_size {prompts} x num_generations {answers}",) * 2
    p, g = t.settings["per_device_batch_size"], t.settings["gradient_accumulation_steps"]
    there = f"global_batch_to_train = per_device_batch_size {p} x devices x gradient_accumulation_steps {g}"
    here = f"global_batch_size_to_train_on = per_device_batch_size {p} x devices x gradient_accumulation_steps {g}"
    return there, here
