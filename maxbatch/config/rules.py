"""Rules between keys: alternatives that displace each other, and values that exclude each other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maxbatch.config.file_formats import file_formats, has_records, record_types
from maxbatch.config.foreign_words import foreign_words
from maxbatch.config.keys import Keyed, Part
from maxbatch.config.paths import is_mixture_file
from maxbatch.config.recipes import Recipe, check_kind
from maxbatch.config.sections import (
    KEYS,
    READY_TASKS,
    STORES,
    AllKeys,
    customised_tensors,
    names_of,
)
from maxbatch.config.values import Value, exact, in_brackets, in_runs, in_tokens, shown, value_text
from maxbatch.families.cycle import cycle_length
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.attention import GLOBAL, LOCAL
from maxbatch.families.forms.form import refusal
from maxbatch.families.matrices import KEPT_OF_EXPERTS, OF_PEFT
from maxbatch.system.errors import ConfigError

# Reinforcement learning states its batch in prompts, by batch_size, in place of these.
PRETRAINING_BATCH = names_of(Part.BATCH) + names_of(Part.RAMP)
_LENGTHS = names_of(Part.LENGTH)
BYTE_VOCABULARY = 259  # 256 bytes and three special tokens
_WITHOUT_PATH = ("python_stdlib", "synthetic", *READY_TASKS)
# Types of data whose duplicates are not looked for, and why.
_WITHOUT_DUPLICATES = {
    "tokens": "was prepared before, and maxbatch prepare takes deduplicate=true",
    "megatron": "is read in place, with all documents of the store",
    **dict.fromkeys(("synthetic", *READY_TASKS), "is computed, not read"),
}
# Decays per update, each with its alternative in tokens.
_IN_TOKENS = {
    "adam_b1": "adam_b1_half_life",
    "adam_b2": "adam_b2_half_life",
    "adam_weight_decay": "weight_decay_timescale",
}
_MOST_TOKENS = 2**63
_MOST_INT8_TERMS = (2**31 - 1) // 127**2
_OTHER_BATCHES = ("global_batch_size", "batch_size_schedule")
_BUDGET = "max_tokens_per_pass"
_OF_PASSES = ("per_device_batch_size", "gradient_accumulation_steps")  # which follow from it

Values = Mapping[str, Value]


class Displaced(NamedTuple):
    """A key displaced by an alternative from a higher layer."""

    name: str
    by: str
    to_default: bool = False  # True: it gets its default again; False: it is unset (null, no ramp)


def displaced(values: Values, stated_names: set[str]) -> Iterator[Displaced]:
    """Yields the keys that a layer displaces in lower layers; raises ConfigError for a batch in
    prompts and in rows.

    Args:
      values: those of all keys.
      stated_names: keys that the layer sets to non-null.
    """
    if values["batch_size"] is not None:
        for name in PRETRAINING_BATCH:
            if name in stated_names:
                is_typed = "batch_size" in stated_names
                rows = "; the samples of an update are global_batch_size" if is_typed else ""
                works = f"batch_size=null, or {name} left out" if is_typed else f"{name} left out"
                raise ConfigError(
                    f"{name}={shown(value_text(values[name]))}: must not be stated beside batch_size="
                    f"{values['batch_size']}, which states the batch in prompts{rows}; works: {works}"
                )
            yield Displaced(name, "batch_size", to_default=True)
    lengths = [name for name in _LENGTHS if name in stated_names]
    if lengths:
        yield from (Displaced(name, lengths[0]) for name in _LENGTHS if name not in lengths)
    ramp = [
        name
        for name in names_of(Part.RAMP)
        if name in stated_names and values["enable_rampup_batch_size"]
    ]
    batches = [name for name in _OTHER_BATCHES if name in stated_names]
    accumulation = (
        ["gradient_accumulation_steps"] if "gradient_accumulation_steps" in stated_names else []
    )
    if by := [*batches, *ramp, *accumulation]:
        yield from (Displaced(name, by[0]) for name in _OTHER_BATCHES if name not in batches)
    if batches and not ramp:
        yield Displaced("enable_rampup_batch_size", batches[0])
        if not accumulation:
            yield Displaced("gradient_accumulation_steps", batches[0])
    if _BUDGET in stated_names and values["batch_size"] is None:
        lower = [name for name in _OF_PASSES if name not in stated_names]
        yield from (Displaced(name, _BUDGET) for name in lower)
    if values[_BUDGET] is None:
        yield from _displaced_rows(values, stated_names)
    for per_update, in_words in _IN_TOKENS.items():
        if {per_update, in_words} <= stated_names:
            raise ConfigError(f"{in_words}={shown(str(values[in_words]))}: must not be stated beside {per_update}="
                              f"{values[per_update]}, the same decay per update; works: {per_update}=null, or "
                              f"{in_words} left out")  # fmt: skip
        yield from (Displaced(per_update, name) for name in {in_words} & stated_names)
        yield from (Displaced(in_words, name) for name in {per_update} & stated_names)
    if "remat_policy" in stated_names and values["remat_policy"] != "custom":
        below = [name for name in customised_tensors(values) if name not in stated_names]
        yield from (Displaced(name, "remat_policy", to_default=True) for name in below)


def _displaced_rows(values: Values, stated_names: set[str]) -> Iterator[Displaced]:
    """Yields p if a layer states both global batch and accumulation steps, which determine p.

    A higher layer that states p displaces the steps; one that states another batch restores p's
    default.
    """
    rows, steps, batch = names_of(Part.BATCH)[:3]
    pair = {steps, batch}
    if rows in stated_names:
        if not pair & stated_names and all(values[name] is not None for name in pair):
            yield Displaced(steps, rows)
    elif pair <= stated_names:
        yield Displaced(rows, batch)
    elif values[rows] is None and (others := stated_names & set(PRETRAINING_BATCH)):
        yield Displaced(rows, min(others), to_default=True)


def refuse_pairs_without_prompts(values: Values, remedies: Mapping[str, str]) -> None:
    """Raises ConfigError for keys of a batch of prompts if no layer states such a batch.

    `remedies` hold, by key, the advice in place of the values that its refusal would name.
    """
    for name in names_of(Part.PROMPT_BATCH):
        if values[name] != KEYS[name].default_value:
            words = foreign_words()
            word = words.elsewhere(name)
            elsewhere = f" ({name} {word.answer()})" if word else ""
            rule = "belongs to reinforcement learning, and has no effect without batch_size, the prompts of a batch"
            has_rows = (
                values["per_device_batch_size"] != KEYS["per_device_batch_size"].default_value
            )
            meant = {} if has_rows else words.batch_of(name, values)
            settings = {**meant, name: KEYS[name].default}
            works = " ".join(f"{key}={text}" for key, text in settings.items())
            text_of_value = value_text(values[name])
            raise ConfigError(
                f"{name}={text_of_value}: {rule}{elsewhere}; works: {remedies.get(name, works)}"
            )


def likely_type(path: str) -> str:
    """Returns the dataset_type that fits a path's name."""
    if ".json.gz" in path:  # lines of JSON under this name are common
        return "jsonl"
    return next((kind for kind in file_formats() if f".{kind}" in path), "text")


def check_data_paths(values: Keyed) -> None:
    """Raises ConfigError for a path that would not be read, or held-out data stated twice."""
    kind = values["dataset_type"]
    stated_paths = [name for name in ("dataset_path", "eval_dataset_path") if values[name]]
    if kind == "python_stdlib" and is_mixture_file(str(values["dataset_path"]), kind):
        stated_paths.remove("dataset_path")  # each source has its own type
    if kind in _WITHOUT_PATH and stated_paths:
        path = str(values[stated_paths[0]])
        emptied = " ".join(f"{name}=''" for name in stated_paths)
        works = f"dataset_type={likely_type(path)}" if kind == "python_stdlib" else emptied
        raise ConfigError(
            f"{stated_paths[0]}={shown(path)}: dataset_type={kind} reads no path; works: {works}"
        )
    recipe = Recipe.of(values)
    if (
        recipe.fields
        and not (kind == "tokens" or has_records(kind))
        and not is_mixture_file(str(values["dataset_path"]), kind)
    ):
        raise ConfigError(f"dataset_type={kind}: {recipe.key}=true reads records ({recipe.fields}) "
                          f"of {', '.join(record_types())} or prepared tokens; works: {recipe.key}=false")  # fmt: skip
    if values["deduplicate"] and kind in _WITHOUT_DUPLICATES:
        raise ConfigError(f"deduplicate=true: dataset_type={kind} {_WITHOUT_DUPLICATES[kind]}; "
                          "works: deduplicate=false")  # fmt: skip
    held_out, share = values["eval_dataset_path"], values["eval_fraction"]
    if held_out and share:
        raise ConfigError(f"eval_fraction={share}: eval_dataset_path={shown(str(held_out))} already "
                          "states the held-out data; works: eval_fraction=0")  # fmt: skip


def check_dataset(values: Keyed) -> None:
    """Raises ConfigError for data that training would refuse before it opens a file."""
    check_data_paths(values)
    kind = values["dataset_type"]
    check_tokenizer(values["tokenizer_type"], values["tokenizer_path"])
    if values["tokenizer_type"] == "byte" and kind not in ("synthetic", *STORES):
        check_vocabulary(values, BYTE_VOCABULARY)


def check_tokenizer(tokenizer_type: str, tokenizer_path: str) -> None:
    """Raises ConfigError for a file beside the byte tokenizer, which reads none."""
    if tokenizer_type == "byte" and tokenizer_path:
        raise ConfigError(f"tokenizer_path={shown(repr(tokenizer_path))}: the byte tokenizer reads no file; "
                          'works: tokenizer_path="", or tokenizer_type=huggingface')  # fmt: skip


def check_vocabulary(values: Keyed, tokens: int) -> None:
    """Raises ConfigError if the model's embedding has fewer rows than the tokenizer has tokens."""
    rows = values["vocab_size"]
    if isinstance(rows, int) and rows < tokens:
        works = f"works: vocab_size={tokens}"
        if values["load_parameters_path"]:  # whose weights may refuse another vocab_size
            works += f", or the tokenizer of the model in load_parameters_path, which knows {rows}"
        raise ConfigError(
            f"vocab_size={rows}: the {values['tokenizer_type']} tokenizer has {tokens} tokens; {works}"
        )


def check_rules(config: AllKeys) -> None:
    """Raises ConfigError for values that exclude each other, and for values that a type cannot
    check.
    """
    family = FAMILIES[config.decoder_block]
    if all(config[name] is None for name in _LENGTHS):
        raise ConfigError(
            f"steps=null: one of {', '.join(_LENGTHS)} must set the length; works: steps=300"
        )
    pair = ("global_batch_size", "gradient_accumulation_steps")
    if config.max_tokens_per_pass is not None:
        _check_budget(config, config.max_tokens_per_pass)
    elif config.per_device_batch_size is None and any(config[name] is None for name in pair):
        raise config.fault(
            "per_device_batch_size", f"a number unless {' and '.join(pair)} are stated", 16
        )
    for name in _OTHER_BATCHES:
        if config.enable_rampup_batch_size and config[name] is not None:
            raise ConfigError(f"{name}={shown(str(config[name]))}: must not be stated beside "
                              f"enable_rampup_batch_size=true; works: {name}=null")  # fmt: skip
    _check_decays(config)
    if config.adam_scaling == "sde":
        for name, needed in (("opt_type", "adamw"), ("learning_rate_scaling", "sqrt")):
            if config[name] != needed:
                rule = f"{needed} beside adam_scaling=sde, a rule for Adam with the square root"
                raise config.fault(name, rule, needed)
    if config.packing_strategy == "best_fit" and not config.packing:
        raise config.fault(
            "packing_strategy",
            "concatenate where packing=false, which packs nothing",
            "concatenate",
        )
    check_kind(config)
    if config.load_full_state_path and config.load_parameters_path:
        raise config.fault(
            "load_full_state_path",
            "empty beside load_parameters_path: a run starts from one of them",
            '""',
        )
    flags = config.libtpu_flags
    if flags not in ("auto", "none") and not all(
        word.startswith("--") for word in flags.split() or [""]
    ):
        raise config.fault(
            "libtpu_flags",
            'auto, none, or flags such as "--xla_enable_async_all_gather=true"',
            "auto",
        )
    for name in customised_tensors(config):
        if config.remat_policy != "custom" and (family.experts or name not in KEPT_OF_EXPERTS):
            rule = "has an effect only with remat_policy=custom"
            raise ConfigError(f"{name}={config[name]}: {rule}; works: remat_policy=custom")
    if config.early_stopping_patience is not None and config.eval_interval == -1:
        raise config.fault(
            "eval_interval", "at least 1 beside early_stopping_patience, which counts evals", 100
        )
    if config.eval_tasks:
        if config.eval_interval == -1:
            raise config.fault(
                "eval_interval", "at least 1 beside eval_tasks, which are scored at evals", 100
            )
    elif config.eval_tasks_limit is not None:
        raise config.fault(
            "eval_tasks_limit", "null without eval_tasks, whose documents it counts", "null"
        )
    _check_optimizer(config)
    _check_schedule(config)
    _check_query_scale(config)
    _check_gemma_scale(config)
    _check_local_checkpoints(config)
    if config.lora_rank:
        _check_adapters(config)
    if not config.run_dir:
        raise config.fault("run_dir", "the path of a folder", "runs/default")
    heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
    if heads % kv_heads and family.attention.groups_heads:
        multiple = max(1, round(heads / kv_heads)) * kv_heads
        raise config.fault(
            "base_num_query_heads", f"a multiple of base_num_kv_heads={kv_heads}", multiple
        )
    if config.head_dim % 2:
        raise config.fault(
            "head_dim", "even, since rotary embeddings turn pairs", config.head_dim + 1
        )
    _check_family(config)
    _check_layers(config)
    _check_cycle(config)
    for form in family.forms:
        form.check(config)
    if config.quantization == "int8":
        _check_int8_sums(config)
    if config.reproducible_sums:
        _check_reproducible_sums(config)
    warmup, decay = config.warmup_steps_fraction, config.wsd_decay_steps_fraction
    if config.learning_rate_schedule == "wsd" and warmup + decay > 1:
        rest = f"{max(0.0, 1 - warmup):.12g}"
        rule = f"at most {rest}, the share that warmup_steps_fraction={warmup:g} leaves"
        raise config.fault("wsd_decay_steps_fraction", rule, rest)
    window = re.fullmatch(r"(\d{1,18}):(\d{1,18})", config.profile_steps)
    if config.profile_steps and not (window and int(window[1]) < int(window[2])):
        raise config.fault("profile_steps", 'empty or "first:end" with first < end', "10:13")


def _check_budget(config: AllKeys, budget: int) -> None:
    """Raises ConfigError for values beside `max_tokens_per_pass` that exclude it."""
    recipe, length = Recipe.of(config), config.max_target_length
    if config.enable_rampup_batch_size:
        rule = (
            "null beside enable_rampup_batch_size=true, which counts rows of a device "
            "(batch_size_schedule ramps a batch of samples)"
        )
        raise config.fault(_BUDGET, rule, "null")
    if budget < length:
        raise config.fault(_BUDGET, f"at least max_target_length={length}, a row", length)

    if recipe.is_sampled:  # batch_size states the batch
        return
    has_batch = any(config[name] is not None for name in _OTHER_BATCHES)
    p, g = (config[name] for name in _OF_PASSES)
    rows = round(exact(p or 16) * (g or 1))
    batch = "" if has_batch else f" global_batch_size={max(1, rows)}"
    if named := [name for name in _OF_PASSES if config[name] is not None]:
        rest = "".join(f" {name}=null" for name in named[1:])
        rule = f"null beside {_BUDGET}, from which rows and passes follow"
        raise config.fault(named[0], rule, f"null{rest}{batch}")
    if not has_batch:
        rule = "stated beside global_batch_size or batch_size_schedule, whose samples share rows"
        raise config.fault(_BUDGET, rule, f"{budget}{batch}")


# Optimizers whose update of a value depends on no other value of its parameter.
_ELEMENTWISE = ("adamw", "lion", "sgd")


def _check_reproducible_sums(config: AllKeys) -> None:
    """Raises ConfigError for a setting whose update is not known to be equal to the last bit."""
    reasons = {
        "opt_type": "" if config.opt_type in _ELEMENTWISE else "which mixes the values of a matrix",
        "quantization": "whose scales are of whole passes" if config.quantization else "",
    }
    for name, reason in reasons.items():
        if reason:
            value = shown(value_text(config[name]))
            raise config.fault(
                "reproducible_sums", f"false beside {name}={value}, {reason}", "false"
            )


# Settings of some optimizers only.
_OF_OPTIMIZERS = {
    "adam_eps_root": ("adamw", "muon"), "mu_dtype": ("adamw", "muon"),
    "muon_beta": ("muon",), "muon_weight_decay": ("muon",), "muon_consistent_rms": ("muon",),
}  # fmt: skip


def _check_optimizer(config: AllKeys) -> None:
    """Raises ConfigError for a setting that the optimizer does not have, and for a mask of invalid
    patterns.
    """
    for name, optimizers in _OF_OPTIMIZERS.items():
        if config.opt_type not in optimizers and config[name] != KEYS[name].default_value:
            rule = f"{KEYS[name].default} beside opt_type={config.opt_type}, which does not have it"
            raise config.fault(name, rule, KEYS[name].default)
    if config.muon_beta is not None and config.adam_b1 is None:
        raise config.fault(
            "muon_beta", "null beside adam_b1_half_life, which states muon's momentum too", "null"
        )
    for pattern in in_brackets(config.adamw_mask or ""):
        try:
            re.compile(pattern)
        except re.error as error:
            rule = (
                f"a list of regular expressions without commas: {shown(pattern)} is none ({error})"
            )
            raise config.fault("adamw_mask", rule, shlex.quote(f"[{re.escape(pattern)}]")) from None


def _check_schedule(config: AllKeys) -> None:
    """Raises ConfigError for a schedule by updates beside settings that count samples."""
    if config.learning_rate_schedule_by == "samples":
        if config.learning_rate_schedule_steps != -1:
            rule = "-1 unless learning_rate_schedule_by=updates"
            raise config.fault("learning_rate_schedule_steps", rule, "-1")
    elif (config.batch_size_schedule or "").startswith("seesaw"):
        rule = "samples beside a seesaw, whose cuts are samples"
        raise config.fault("learning_rate_schedule_by", rule, "samples")


def _check_query_scale(config: AllKeys) -> None:
    """Raises ConfigError for query weights that cannot hold the scale of the scores."""
    if not config.query_weights_scaled:
        return
    family = FAMILIES[config.decoder_block]
    reasons = {
        "use_qk_norm=true, whose norm would remove the scale": config.use_qk_norm,
        f"decoder_block={config.decoder_block}, {family.attention.unscaled_queries}": family.attention.unscaled_queries,
        f"decoder_block={config.decoder_block}, whose heads differ in width": family.attention.has_global_heads,
        "lora_rank, whose adapters would not be scaled": config.lora_rank,
    }
    for reason, holds in reasons.items():
        if holds:
            raise config.fault("query_weights_scaled", f"false beside {reason}", "false")


def _check_gemma_scale(config: AllKeys) -> None:
    """Raises ConfigError for another family whose embedding would hold Gemma's factor."""
    if config.gemma_weights_scaled and not FAMILIES[config.decoder_block].embedding.is_scaled:
        rule = (
            f"false beside decoder_block={config.decoder_block}, whose embedding has no factor "
            "sqrt(base_emb_dim)"
        )
        raise config.fault("gemma_weights_scaled", rule, "false")


def _check_local_checkpoints(config: AllKeys) -> None:
    """Raises ConfigError for local checkpoints without a place or a period, or in a run that cannot
    have them.
    """
    directory, period = config.local_checkpoint_directory, config.local_checkpoint_period
    if not directory:
        if period:
            rule = "0 without local_checkpoint_directory, each host's folder for them"
            raise config.fault("local_checkpoint_period", rule, 0)
        return
    if not period:
        raise config.fault(
            "local_checkpoint_period", "at least 1 beside local_checkpoint_directory", 10
        )
    if not config.enable_checkpointing:
        raise config.fault("enable_checkpointing", "true beside local_checkpoint_directory", "true")


def _check_decays(config: AllKeys) -> None:
    """Raises ConfigError for a decay stated neither per update nor in tokens, or in an invalid
    number of tokens.
    """
    for per_update, name in _IN_TOKENS.items():
        if config[name] is None:
            if config[per_update] is None:
                raise config.fault(
                    per_update, f"a number unless {name} is stated", KEYS[per_update].default
                )
            continue
        takes_runs = name == "weight_decay_timescale"
        _check_tokens(config, name, takes_runs)
        if config.adam_scaling == "sde" and not takes_runs:
            raise config.fault(
                name,
                "null beside adam_scaling=sde, which already makes the decays follow the batch",
                "null",
            )
    if config.parameter_average_half_life is not None:
        _check_tokens(config, "parameter_average_half_life")


def _check_tokens(config: AllKeys, name: str, takes_runs: bool = False) -> None:
    """Raises ConfigError for a key whose text is not a number of tokens, or of runs if
    `takes_runs`.
    """
    text = str(config[name])
    runs = in_runs(text) if takes_runs else None
    if not (1 <= in_tokens(text) <= _MOST_TOKENS if runs is None else 1e-6 <= runs <= 1e6):
        rule = (
            "a number of tokens from 1 to 2^63, such as 2Mt"
            + ", or of runs, such as 1.0run" * takes_runs
        )
        raise config.fault(name, rule, "1.0run" if takes_runs else "2Mt")


def _check_adapters(config: AllKeys) -> None:
    """Raises ConfigError for adapters without a model to adapt, or in a run that cannot have
    them.
    """
    if config.load_full_state_path:
        rule = "0 beside load_full_state_path, whose optimizer has a state for every parameter; load_parameters_path "
        raise config.fault("lora_rank", rule + "names the model to adapt", 0)
    if not config.load_parameters_path:
        raise config.fault(
            "lora_rank", "0 unless load_parameters_path names the model that the adapters adapt", 0
        )
    targets = [name.strip() for name in config.lora_targets.split(",")]
    if not OF_PEFT.keys().isdisjoint(targets):
        own_names = ",".join(dict.fromkeys(OF_PEFT.get(name, name) for name in targets))
        raise config.fault("lora_targets", "names of matrices here, not PEFT's", own_names)


def _check_layers(config: AllKeys) -> None:
    """Raises ConfigError for keys of a layer's form that exclude each other."""
    pattern = [word.strip() for word in config.attention_type.split(",")]
    if not set(pattern) <= {GLOBAL, LOCAL}:
        raise config.fault(
            "attention_type", f"{GLOBAL}, {LOCAL}, or several of them joined by commas", GLOBAL
        )
    forms = FAMILIES[config.decoder_block].attention_forms
    if config.attention_type != GLOBAL and not all(form.has_windows for form in forms):
        rule = (
            f"{GLOBAL} beside decoder_block={config.decoder_block}, whose attention has no windows"
        )
        raise config.fault("attention_type", rule, GLOBAL)
    beside = f"beside attention_type={config.attention_type}"
    works: dict[str, object] = (
        {"sliding_window_size": 1024} if LOCAL in pattern and not config.sliding_window_size else {}
    )
    for form in forms:
        if LOCAL in pattern and (excluded := form.excluded_by_windows(config)):
            raise refusal(config, f"{next(iter(excluded.values()))} {beside}", excluded | works)
    if works:
        raise refusal(config, f"at least 1 {beside}", works)
    positions, length = config.trainable_position_size, config.max_target_length
    if 0 < positions < length:
        raise config.fault(
            "max_target_length", f"at most trainable_position_size={positions}", positions
        )
    if config.rope_type == "longrope":
        _check_factors(config)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if high < low:
        raise config.fault(
            "rope_high_freq_factor", f"at least rope_low_freq_factor={low:g}", 4 * low
        )


def _check_cycle(config: AllKeys) -> None:
    """Raises ConfigError for layers that are not whole cycles of the forms that they repeat."""
    layers, length = config.base_num_decoder_layers, cycle_length(config)
    forms = FAMILIES[config.decoder_block].forms
    steps = (name for form in forms for name in form.steps)
    if too_long := {name: layers for name in steps if config[name] > layers}:
        raise refusal(config, f"at most base_num_decoder_layers={layers}", too_long)
    works: dict[str, object] = {}
    rule = f"a multiple of {length}, the layers of a cycle of forms"
    if layers % length:
        works["base_num_decoder_layers"] = layers = max(1, round(layers / length)) * length
    for form in forms:
        rule, works = form.in_cycles(config, layers, length, rule, works)
    if works:
        raise refusal(config, rule, works)


# Keys without effect in a model without experts.
_OF_EXPERTS = (
    "num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "norm_topk_prob", "routed_bias",
    "routed_bias_update_rate", "load_balance_loss_weight", "load_balance_scope", "router_z_loss_weight",
    "capacity_factor", *KEPT_OF_EXPERTS,
)  # fmt: skip
# Keys of the forms of some families only.
_OF_SOME = tuple(dict.fromkeys(key for family in FAMILIES.values() for key in family.own_keys))


def _check_int8_sums(config: AllKeys) -> None:
    """Raises ConfigError for a product of a layer whose sums an int32 may not hold."""
    rule = f"smaller with quantization=int8: int32 holds the sums of at most {_MOST_INT8_TERMS:,} products"
    family = FAMILIES[config.decoder_block]
    times = dict.fromkeys(("base_emb_dim", "base_mlp_dim", "base_moe_mlp_dim"), 1)
    for form in family.forms:
        times |= form.summed_times(config)
    for name, most in times.items():
        if config[name] * most > _MOST_INT8_TERMS:
            raise config.fault(name, rule, _MOST_INT8_TERMS // most)
    for form in family.attention_forms:
        name, width, multiple = form.summed_heads(config)
        if config[name] * width > _MOST_INT8_TERMS:
            most = _MOST_INT8_TERMS // (width * multiple) * multiple
            raise config.fault(name, rule, most)


def _check_family(config: AllKeys) -> None:
    """Raises ConfigError for keys of forms that the family lacks, or of experts where it has
    none.
    """
    family = FAMILIES[config.decoder_block]
    block = f"decoder_block={family.decoder_block}"

    def defaults_of_stated(names: tuple[str, ...]) -> dict[str, object]:
        """Returns the defaults of the keys that differ from them."""
        return {
            name: KEYS[name].default for name in names if config[name] != KEYS[name].default_value
        }

    lacks = tuple(name for name in _OF_SOME if name not in family.own_keys)
    if not _has_experts(config) and (works := defaults_of_stated(_OF_EXPERTS)):
        name, works = next(iter(works)), works | defaults_of_stated(lacks)
        others = ", ".join(name for name, other in FAMILIES.items() if other.experts)
        why = (
            f"with num_experts={config.num_experts}"
            if family.experts
            else f"(experts are in {others})"
        )
        raise refusal(
            config, f"{works[name]} beside {block}, whose layers have no experts {why}", works
        )
    if works := defaults_of_stated((*lacks, *family.attention.lacks)):
        name = next(iter(works))
        having = ", ".join(
            other.decoder_block for other in FAMILIES.values() if name in other.own_keys
        )
        only = f" (only in {having})" if having else ""
        raise refusal(config, f"{works[name]} beside {block}, which lacks it{only}", works)


def _has_experts(config: AllKeys) -> bool:
    experts = FAMILIES[config.decoder_block].experts
    return experts is not None and experts.are_in(config)


def _check_factors(config: AllKeys) -> None:
    """Raises ConfigError unless longrope's factors are one positive number for each pair of a
    head.
    """
    pairs = FAMILIES[config.decoder_block].attention.rotated(config) // 2
    ones = ",".join(["1"] * pairs)

    def fits(name: str) -> bool:
        words = [word.strip() for word in str(config[name]).split(",")]
        numbers = [float(word) for word in words if re.fullmatch(r"\d+(\.\d+)?(e[-+]?\d+)?", word)]
        return len(numbers) == len(words) == pairs and min(numbers) > 0

    if wrong := [name for name in ("rope_short_factors", "rope_long_factors") if not fits(name)]:
        works = " ".join([ones, *(f"{name}={ones}" for name in wrong[1:])])
        raise config.fault(
            wrong[0], f"{pairs} positive numbers joined by commas beside rope_type=longrope", works
        )
    if config.original_max_position_embeddings == 1:
        raise config.fault(
            "original_max_position_embeddings", "at least 2 beside rope_type=longrope", 4096
        )
