"""Rules of MaxText's table on the run, its program, its adapters and its ramp."""

from __future__ import annotations

import math
import re

from maxbatch.around.importers.maxtext_data import DATA_CONDITIONS, DATA_RULES
from maxbatch.around.importers.maxtext_defaults import default_of, follows, is_default
from maxbatch.around.importers.maxtext_model import MODEL_CONDITIONS, MODEL_RULES
from maxbatch.around.importers.maxtext_rl import RL_CONDITIONS, RL_RULES
from maxbatch.around.importers.steps import take_checkpoint
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.translation import Translation
from maxbatch.around.maxtext.checkpoints.names import LAYER_MATRICES
from maxbatch.config.loading import load_config
from maxbatch.config.paths import presets
from maxbatch.config.sections import KEYS, REMAT_TENSORS
from maxbatch.config.values import NULLS, in_brackets, shown
from maxbatch.families.matrices import KEPT_OF_EXPERTS
from maxbatch.plan.mesh_shape import AXES, axis_key

_SPARSE = (  # its models with experts
    "gpt-oss-20b",
    "gpt-oss-120b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek3-671b",
)
# Our names of the matrices that adapters adapt, by MaxText's.
_TARGETS = {there: ours for ours, there in LAYER_MATRICES.items()}


def _run_dir(t: Translation, word: str) -> None:
    """Takes the folder of all runs together with the run's name."""
    folder, name = (
        t.text(word) if "$" not in t.text(word) else ""
        for word in ("base_output_directory", "run_name")
    )
    if word == "base_output_directory" and folder:
        t.map(word, run_dir=f"{folder.rstrip('/')}/{name}" if name else folder)
    elif word == "run_name" and name:
        t.map(word, run_dir=t.settings.get("run_dir", name if "/" in name else f"runs/{name}"))


def _unknown_schedule(t: Translation, _: str) -> None:
    t.refuse(
        "lr_schedule_type", "must be cosine, wsd or constant"
    )  # on prompts the rate is taken already


def _decayed(t: Translation, word: str) -> None:
    patterns = _patterns(t, word)
    why = "all parameters decay" if not patterns else "all others decay"
    t.map(word, why, adamw_mask=f"[{','.join(patterns)}]")


def _patterns(t: Translation, word: str) -> list[str]:
    return [
        pattern for item in t.items(word) for pattern in in_brackets(item) if pattern not in NULLS
    ]


def _profile(t: Translation, word: str) -> None:
    first, count = t.number("skip_first_n_steps_for_profiler"), t.number("profiler_steps")
    start = int(first if first is not None else 1)
    t.map(word, profile_steps=f"{start}:{start + int(count or 5)}")


def _is_dense(t: Translation) -> bool:
    return (t.number("num_experts") or 1) <= 1 and t.text("model_name") not in _SPARSE


def _tensors(t: Translation, _: str) -> None:
    """Leaves out choices per tensor that the policy or the model does not read."""
    policy = t.text("remat_policy")
    for word in REMAT_TENSORS:
        if word in t and policy != "custom":
            t.ignore(word, f"only remat_policy=custom reads it, not {shown(policy)}")
        elif word in t and word in KEPT_OF_EXPERTS and _is_dense(t):
            t.ignore(word, "the model has no experts")


def _repeats(t: Translation, _: str) -> None:
    word = "num_pipeline_repeats"
    stages = [t.number(f"{net}_pipeline_parallelism") or 1 for net in ("ici", "dcn")]
    if t.text(word) not in ("-1", ""):
        return
    if stages[0] * stages[1] > 1:
        name = t.text("model_name")
        named = [f"model_name={name}"] if name in presets() else []
        layers = (
            t.number("base_num_decoder_layers")
            or load_config(overrides=named).base_num_decoder_layers
        )
        each = int(stages[0] * stages[1] * (t.number("num_layers_per_pipeline_stage") or 1))
        t.map(
            word, "layers / (stages x layers of a stage)", num_pipeline_repeats=str(layers // each)
        )
    elif word in t:
        t.ignore(word, "there is no pipeline")


def _mesh(t: Translation, _: str) -> None:
    """Takes MaxText's axes that split the same dimensions as one of ours."""
    same = {
        "fsdp": ("fsdp_transpose", *(["expert"] if _is_dense(t) else [])),
        "tensor": ("tensor_sequence",),
    }
    for net in ("ici", "dcn"):
        for axis, beside in same.items():
            ours = axis_key(net, axis)
            words = [
                word
                for word in (axis_key(net, other) for other in beside)
                if (t.number(word) or 1) != 1
            ]
            sizes = [t.number(word) or 1 for word in (ours, *words)]
            if words:
                size = -1 if -1 in sizes else math.prod(sizes)
                for word in (ours, *words):
                    if word in t or word != ours:
                        t.map(word, " x ".join((ours, *words)), **{ours: f"{size:g}"})
    others = [axis_key("dcn", axis) for axis in AXES if axis != "data"]
    if (
        "-1" in [t.settings.get(word, t.text(word)) for word in others]
        and "dcn_data_parallelism" not in t
    ):
        t.drop("dcn_data_parallelism")


def _targets(t: Translation, word: str) -> None:
    targets = [
        ours
        for there, ours in _TARGETS.items()
        if re.search(rf"(?<![a-z]){there}(?![a-z0-9])", t.text(word))
    ]
    if word in t and not targets:
        t.refuse(word, f"must be a pattern of {', '.join(_TARGETS)}", is_essential=True)
    else:
        t.map(word, lora_targets=",".join(targets) if 0 < len(targets) < len(_TARGETS) else "all")


def _equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in MaxText's words and in ours."""
    if "batch_size" in t.settings:
        prompts, answers = (
            t.settings["batch_size"],
            t.settings.get("num_generations", "num_generations"),
        )
        return (f"effective batch = batch_size {prompts} x num_generations {answers}",) * 2
    p, g = t.settings["per_device_batch_size"], t.settings["gradient_accumulation_steps"]
    there = (
        f"global_batch_to_train = per_device_batch_size {p} x devices x "
        f"gradient_accumulation_steps {g}"
    )
    here = (
        f"global_batch_size_to_train_on = per_device_batch_size {p} x devices x "
        f"gradient_accumulation_steps {g}"
    )
    return there, here


FORMAT = Format(
    "maxtext",
    _equation,
    {
        **MODEL_RULES,
        **RL_RULES,
        **DATA_RULES,
        "excuse": lambda t, _: t.excuse(is_default),
        "run_dir": _run_dir,
        "unknown_schedule": _unknown_schedule,
        "profile": _profile,
        "decayed": _decayed,
        "tensors": _tensors,
        "repeats": _repeats,
        "mesh": _mesh,
        "of_block": lambda t, word: t.rename(word, word.partition(".")[2]),
        "targets": _targets,
        "checkpoint": take_checkpoint,
    },
    {
        **MODEL_CONDITIONS,
        **RL_CONDITIONS,
        **DATA_CONDITIONS,
        "follows": lambda _, word: follows(word),
        "is_of_run": lambda t, word: t.text(word) in ("-1", t.text("steps")),
        "has_patterns": lambda t, word: bool(_patterns(t, word)),
        "is_weight_dtype": lambda t, word: t.text(word) == t.text("weight_dtype"),
        "is_another_policy": lambda t, word: t.text(word) not in KEYS["remat_policy"].choices,
        "is_renamed": lambda _, word: word not in ("dpo.algo", "dpo.max_prompt_length"),
        "has_teacher": lambda t, _: t.states_below("student_overrides.", "teacher_overrides."),
    },
    default_of=default_of,
)
