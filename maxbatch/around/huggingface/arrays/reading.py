"""A Hugging Face folder as a source of parameters, which go shard by shard onto their devices."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from maxbatch.around.huggingface.arrays.exchange import read_shared
from maxbatch.around.huggingface.arrays.tensors import (
    NOT_PARAMETERS,
    TensorPlace,
    layouts_of,
    parameter_places,
    tensor_shapes,
)
from maxbatch.around.huggingface.folder.config_json import CONFIG_FILE
from maxbatch.config.config import Config
from maxbatch.config.hub import folder_of
from maxbatch.config.loading import load_config
from maxbatch.config.model_forms import end_tokens
from maxbatch.config.sections import ModelConfig
from maxbatch.config.values import first_of, shown, shown_path
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.experts import ROUTED_BIAS
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.hosts import gather
from maxbatch.parallel.sharding import zeros_of
from maxbatch.parallel.trees import State
from maxbatch.system.errors import ConfigError
from maxbatch.system.hardware.host_arrays import copy_by_lines, empty_aligned
from maxbatch.system.storage.contents import (
    Block,
    blocks_of,
    content_stamp,
    digests,
    md5_of,
    stored_sum,
)
from maxbatch.system.storage.safetensors import (
    DTYPE_NAMES,
    DTYPES,
    StoredTensor,
    stored_tensors,
    tensor_files,
)
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.system.storage.watched_files import Stamp, changed

_MOST_NAMES = 3  # of tensors in a message
# of a layer that predicts further tokens
_PREDICTING = re.compile(r"(model\.layers\.(\d{1,6})\.)eh_proj\.weight$")
_OF_SUMS = "sums "  # prefix of an identity made of checksums of whole files


class HuggingFaceFolder:
    """A Hugging Face folder, or a model of the hub (`maxbatch.run.weights.origin.Source`)."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._identity = ""  # as it was hashed
        self._stamps: dict[str, Stamp] = {}  # of its files when they were hashed, or else opened

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Returns the config that its `config.json` states, with "key=value" texts over it."""
        return load_config(
            overrides=["model_name=auto", f"load_parameters_path={self._path}", *overrides]
        )

    @property
    def _folder(self) -> AnyPath:
        return folder_of(self._path, weights=True)

    @property
    def _files(self) -> list[AnyPath]:
        folder = self._folder
        return sorted([folder / CONFIG_FILE, *tensor_files(folder)], key=str)

    @property
    def identity(self) -> str:
        """A hash of everything read from it: `config.json`, the ids that end a text, and the files
        of its tensors.

        If all hosts have the files in a store, it uses the store's checksums and reads no object.
        """
        self._stamps = self._stamped()
        sums = [stored_sum(file) for file in self._files]
        return self._hashed(self._of_sums(sums) if all(gather(all(sums))) else self._of_blocks())

    def identity_like(self, other: str) -> str:
        """Returns the identity in the form of another one, for a copy on a disk or in another
        store.
        """
        self._stamps = self._stamped()
        return self._hashed(
            self._of_own_sums() if other.startswith(_OF_SUMS) else self._of_blocks()
        )

    def _hashed(self, identity: str) -> str:
        self._identity = identity
        return identity

    def _stamped(self) -> dict[str, Stamp]:
        return {str(file): content_stamp(file) for file in self._files}

    def _check_unchanged(self) -> None:
        """Raises ConfigError if a file has other content than when it was hashed, or else opened.

        Every host checks by itself, and hashes all files again if the stamp of one differs.
        """
        now = self._stamped()
        if now == self._stamps:
            return
        if self._identity.startswith(_OF_SUMS):
            is_same = self._of_own_sums() == self._identity
        else:
            is_same = bool(self._identity) and self._of_blocks(alone=True) == self._identity
        if not is_same:
            names = [
                name for name in {**self._stamps, **now} if now.get(name) != self._stamps.get(name)
            ]
            raise changed(as_path(names[0]))
        self._stamps = now

    def _of_own_sums(self) -> str:
        return self._of_sums([stored_sum(file) or md5_of(file) for file in self._files])

    def _of_sums(self, sums: Sequence[str]) -> str:
        names = [file.name for file in self._files]
        content = json.dumps([end_tokens(self._path), list(zip(names, sums, strict=True))])
        return f"{_OF_SUMS}{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"

    def _of_blocks(self, alone: bool = False) -> str:
        """Returns the identity by the content itself.

        Hosts that see the same files hash a share of the blocks each. A host with files of its own
        hashes them all.

        Args:
          alone: whether this host hashes all of them, because the others need not call it.
        """
        files, blocks = self._files, list[Block]()
        content = json.dumps(end_tokens(self._path)).encode()
        seen = [content_stamp(file) for file in files]
        for file, (size, _) in zip(files, seen, strict=True):
            blocks += blocks_of(file, size)
        is_shared = not alone and len({json.dumps(block) for block in gather(seen)}) == 1
        host, num_hosts = (jax.process_index(), jax.process_count()) if is_shared else (0, 1)
        mine = blocks[len(blocks) * host // num_hosts : len(blocks) * (host + 1) // num_hosts]
        total = sum(
            _number(f"{block.file.name} {block.begin} {block.end}".encode(), hashed)
            for block, hashed in zip(mine, digests(mine), strict=True)
        )
        if is_shared:
            total = sum(int(text, 16) for text in gather(f"{total:x}"))
        return f"{(total + _number(content, b'')) % (1 << 128):032x}"

    @property
    def stored_dtype(self) -> str:
        """The type of its matrices; biases may be float32 in any folder."""
        tensors = stored_tensors(self._folder).values()
        stored = next((tensor.dtype for tensor in tensors if len(tensor.shape) > 1), "F32")
        return next((name for name, theirs in DTYPE_NAMES.items() if theirs == stored), "float32")

    @property
    def step(self) -> None:
        """None: it is not a checkpoint."""

    def adapting(self) -> None:
        """Returns None: it holds a whole model."""

    def open(self, config: ModelConfig, abstract_params: State) -> Callable[[State], State]:
        """Returns a function that reads its parameters: those of `abstract_params`, or some of
        them.

        A host cuts the parts of its devices from memory maps of the files, one tensor at a time,
        each once, and turns them into the parameter's order of axes. Of several hosts each reads a
        share of the rows. The largest parameters come first, while most memory is free.

        Raises:
          ConfigError: tensors are missing, unexpected, or differ from the config in shape or type.
            The function raises it for a file that is no longer the one that was hashed.
        """
        self._stamps = self._stamps or self._stamped()
        stored = stored_tensors(self._folder)
        family = FAMILIES[config.decoder_block]
        if not any(name.startswith(family.prefix) for name in stored):
            stored = {family.prefix + name: tensor for name, tensor in stored.items()}
        places = parameter_places(config, _without_bias(config, abstract_params))
        tied_output = f"{family.modules['output']}.weight" if config.logits_via_embedding else ""
        stored = _without_predicting(stored, config.base_num_decoder_layers)
        _check_tensors(self._folder, stored, tensor_shapes(places), tied_output)

        def read(part: State) -> State:
            leaves = jax.tree.leaves_with_path(part)
            arrays: dict[int, jax.Array] = {}
            for number in sorted(
                range(len(leaves)), key=lambda number: -math.prod(leaves[number][1].shape)
            ):
                keys, abstract = leaves[number]
                path = parameter_path(keys)
                arrays[number] = (
                    _read(stored, places[path], abstract) if path in places else zeros_of(abstract)
                )
            self._check_unchanged()
            whole: State = jax.tree.unflatten(
                jax.tree.structure(part), [arrays[i] for i in range(len(leaves))]
            )
            return whole

        return read


def _number(name: bytes, hashed: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name + b"\0" + hashed, digest_size=16).digest(), "little")


def _without_bias(config: ModelConfig, abstract_params: State) -> State:
    """Returns the parameters that a folder of the family holds: routers begin without a bias if it
    has none.
    """
    flat = nnx.to_flat_state(abstract_params)
    layouts = layouts_of(config)
    state: State = nnx.from_flat_state(
        item for item in flat if item[0][-1] != ROUTED_BIAS or item[0] in layouts
    )
    return state


def _without_predicting(
    stored: dict[str, StoredTensor], num_layers: int
) -> dict[str, StoredTensor]:
    """Returns the tensors without the layers after the last one, with which DeepSeek's models
    predict more tokens.
    """
    layers = {name: _PREDICTING.match(name) for name in stored}
    extra = {match[1] for match in layers.values() if match and int(match[2]) >= num_layers}
    return {name: tensor for name, tensor in stored.items() if not name.startswith(tuple(extra))}


Cut = tuple[tuple[int, int], ...]  # begin and end along each axis of a parameter


def _read(
    stored: dict[str, StoredTensor], place: TensorPlace, abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns one parameter, each device holding its own part."""
    assert abstract.sharding is not None
    if not abstract.sharding.is_fully_addressable and len(place.part_shape) == 2:
        return read_shared(stored, place, abstract)
    cuts: dict[jax.Device, Cut] = {}
    for device, index in abstract.sharding.addressable_devices_indices_map(abstract.shape).items():
        edges = (
            cut.indices(size)[:2] for cut, size in zip(index or (), abstract.shape, strict=True)
        )
        cuts[device] = tuple(edges)
    shards = _parts(stored, place, set(cuts.values()), np.dtype(abstract.dtype))
    arrays = [jax.device_put(shards[cut], device) for device, cut in cuts.items()]
    array = jax.make_array_from_single_device_arrays(
        abstract.shape, abstract.sharding, arrays, dtype=abstract.dtype
    )
    # of accelerators; the parts are then no longer needed
    whole: jax.Array = array.block_until_ready()
    return whole


def _parts(
    stored: dict[str, StoredTensor], place: TensorPlace, cuts: set[Cut], dtype: np.dtype
) -> dict[Cut, np.ndarray]:
    """Returns parts of a parameter; each of its tensors is read once."""
    shards = {cut: empty_aligned([end - begin for begin, end in cut], dtype) for cut in cuts}
    with ThreadPoolExecutor() as threads:
        for index, name in zip(place.parts, place.names, strict=True):
            rows = {cut: _row_of(cut, part, index) for cut, part in shards.items()}
            wanted = {cut: row for cut, row in rows.items() if row is not None}
            if not wanted:
                continue
            tensor = place.cut(stored[name].array())
            inside = (
                tuple(slice(*edges) for edges in cut[len(cut) - row.ndim :])
                for cut, row in wanted.items()
            )
            list(threads.map(copy_by_lines, [tensor[cut] for cut in inside], wanted.values()))
    return shards


def _row_of(cut: Cut, part: np.ndarray, index: tuple[int, ...]) -> np.ndarray | None:
    """Returns a view of a layer, or of one of its experts, in a part of the parameter; None if it
    is not there.
    """
    edges = list(zip(index, cut, strict=False))
    if not all(begin <= number < end for number, (begin, end) in edges):
        return None
    row: np.ndarray = part[tuple(number - begin for number, (begin, _) in edges)]
    return row


def _check_tensors(
    folder: AnyPath,
    stored: dict[str, StoredTensor],
    expected: dict[str, tuple[int, ...]],
    tied_output: str,
) -> None:
    if missing := [name for name in expected if name not in stored]:
        raise ConfigError(
            f"{shown_path(folder)}: lacks {_some(missing)}, which a model of these keys has"
        )
    known = {name for name in stored if name.endswith(NOT_PARAMETERS) or name == tied_output}
    if unexpected := sorted(stored.keys() - expected.keys() - known):
        raise ConfigError(
            f"{shown_path(folder)}: holds {_some(unexpected)}, which a model of these keys does "
            "not have"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            theirs, ours = (list(shape) for shape in (stored[name].shape, shape))
            raise ConfigError(
                f"{shown_path(folder)}: {name} has the shape {theirs}; the model keys make it "
                f"{ours}"
            )
        if stored[name].dtype not in DTYPES:
            dtype, works = shown(stored[name].dtype), ", ".join(DTYPES)
            raise ConfigError(
                f"{shown_path(folder)}: {name} has the type {dtype}; must be one of {works}"
            )


def _some(names: list[str]) -> str:
    return first_of([shown(name) for name in names], _MOST_NAMES)
