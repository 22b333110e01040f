"""Adapters in the format of Hugging Face's PEFT: `adapter_config.json` and
`adapter_model.safetensors`.

Names and layouts are those of https://github.com/huggingface/peft, `src/peft/tuners/lora`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from maxbatch.around.huggingface.arrays.tensors import TensorPlace, parameter_places
from maxbatch.around.huggingface.export.model import new_folder
from maxbatch.around.huggingface.folder.config_json import is_huggingface_folder
from maxbatch.around.huggingface.folder.files import is_exported, tokenizer_files
from maxbatch.families.family import FAMILIES
from maxbatch.families.parameter import ParameterPath
from maxbatch.families.record import Json
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.trees import State
from maxbatch.run.folder.json_file import write_json
from maxbatch.run.weights.parameters import load_adapters
from maxbatch.system.errors import writing
from maxbatch.system.storage.atomic_files import writing_folder
from maxbatch.system.storage.safetensors import DTYPE_NAMES, DTYPES, write_tensors
from maxbatch.update.adapters import Adapters, Target

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of PEFT's names


class AdaptedPart(NamedTuple):
    """A target's part of a linear module."""

    target: Target
    place: TensorPlace


class Module(NamedTuple):
    """A linear module of the family, which may join several matrices, and its adapted parts."""

    name: str  # with {layer}
    layers: range  # the numbers of the layers that have it
    parts: tuple[AdaptedPart, ...]
    num_outputs: int
    # Whether PEFT is to find it by its parameter. Where there are experts, PEFT 0.21 takes a module
    # whose name ends as those of their matrices, such as the one of an MLP, for them.
    is_by_parameter: bool

    def adapter(
        self, layer: int, arrays: dict[ParameterPath, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns A, [n R, inputs], and B, [outputs, n R], of its n parts: the ranks of joined
        matrices add up.
        """
        a_parts, columns = [], []
        for part in self.parts:
            a, b = arrays[part.target.a_path][layer], arrays[part.target.b_path][layer]
            rank = a.shape[-1]
            b_OxR = b.reshape(rank, -1).T
            column = np.zeros((self.num_outputs, rank), b.dtype)
            column[part.place.indices if part.place.layout.joined else ...] = b_OxR
            a_parts.append(a.reshape(-1, rank).T)
            columns.append(column)
        return np.concatenate(a_parts), np.concatenate(columns, axis=1)


def export_adapters(
    run: str, output: str, dtype: str | None, averaged: bool = False, base_path: str = ""
) -> str:
    """Writes the adapters of a run as a PEFT folder, atomically; returns a summary to print.

    Args:
      run: a run folder, or one of its checkpoints.
      output: the folder to write, new or empty.
      dtype: of the tensors; None: float32, in which they are trained.
      averaged: whether to write the average of the adapters that the run keeps.
      base_path: where the model that they adapt is now; "": at the path that the run states.

    Raises:
      ConfigError: there is no such run, it has no adapters, or the output is not empty.
    """
    target = new_folder(output)
    config, base, adapters, params = load_adapters(run, averaged, base_path)
    arrays = {
        parameter_path(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)
    }
    modules = _modules(adapters, base, parameter_places(config.model, base))
    stored_as = DTYPE_NAMES[dtype or "float32"]
    tensors = {name: tensor.astype(DTYPES[stored_as]) for name, tensor in _tensors(modules, arrays)}
    with writing(output):
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        with writing_folder(target, CONFIG_FILE, is_exported) as folder:
            write_tensors(folder / TENSORS_FILE, stored_as, shapes, iter(tensors.values()))
            for name, content in tokenizer_files(config.data).items():
                (folder / name).write_bytes(content)
            write_json(
                folder / CONFIG_FILE,
                _config_json(config.decoder_block, config.load_parameters_path, adapters, modules),
            )
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return (
        f"adapters of {len(modules)} modules a layer, {num_bytes / 1e6:,.1f} MB of "
        f"{dtype or 'float32'}, in {output}"
    )


def _modules(
    adapters: Adapters, base: State, places: dict[ParameterPath, TensorPlace]
) -> list[Module]:
    targets = {target.path: target for target in adapters.targets(base)}
    modules, has_experts = {}, any("experts" in path for path in places)
    for path in targets:
        layout = places[path].layout
        group = layout.joined or (path,)
        adapted = tuple(
            AdaptedPart(targets[path], places[path]) for path in group if path in targets
        )
        num_inputs = math.prod(targets[path].shape[1 : 1 + targets[path].num_inputs])
        num_outputs = sum(math.prod(places[path].shape) for path in group) // num_inputs
        layers = places[path].layers
        is_by_parameter = has_experts and path[-2] in ("mlp", "shared_experts")
        name = layout.name.removesuffix(".weight")
        modules[layers, layout.name] = Module(name, layers, adapted, num_outputs, is_by_parameter)
    return list(modules.values())


def _tensors(
    modules: list[Module], arrays: dict[ParameterPath, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    for module in modules:
        for index, layer in enumerate(module.layers):
            name = _PREFIX + module.name.format(layer=layer)
            a, b = module.adapter(index, arrays)
            yield f"{name}.lora_A.weight", a
            yield f"{name}.lora_B.weight", b


def _config_json(decoder_block: str, base: str, adapters: Adapters, modules: list[Module]) -> Json:
    # At most two components within a layer, since GPT-2's attention and MLP both have a c_proj.
    names = {
        module: ".".join(module.name.rpartition("{layer}.")[2].split(".")[-2:])
        for module in modules
    }
    joined = {names[module]: len(module.parts) for module in modules if len(module.parts) > 1}
    by_parameter = {names[module] for module in modules if module.is_by_parameter}
    alpha = int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if is_huggingface_folder(base) else None,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": FAMILIES[decoder_block].inputs_first,
        "target_modules": sorted(set(names.values()) - by_parameter),
        "target_parameters": sorted(f"{name}.weight" for name in by_parameter) or None,
        "rank_pattern": {name: number * adapters.rank for name, number in joined.items()},
        "alpha_pattern": {name: number * alpha for name, number in joined.items()},
    }
