"""Tensors onto the devices of several hosts: each row is read once, and the devices exchange the
rest.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from maxbatch import load_config
from maxbatch.around.huggingface.arrays.exchange import adder_of, exchange_of, read_shared
from maxbatch.around.huggingface.arrays.reading import HuggingFaceFolder
from maxbatch.around.huggingface.arrays.tensors import parameter_places, tensor_shapes
from maxbatch.around.huggingface.folder.model_fields import config_json
from maxbatch.cli import main
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import parameter_shardings
from maxbatch.run.pretraining import train
from maxbatch.system.storage.safetensors import StoredTensor, stored_tensors, write_tensors
from maxbatch.system.storage.storage import as_path
from maxbatch.testing import run
from maxbatch.update.state import abstract_model
from tests.helpers.parameters import load_parameters
from tests.helpers.stores import Store, on
from tests.helpers.tiny import UNSAVED, read_metrics

SIZES = (
    "base_emb_dim=16",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "head_dim=4",
    "base_mlp_dim=24",
    "base_num_decoder_layers=2",
    "vocab_size=41",
)
KEYS = {
    "llama2": ("logits_via_embedding=false",),
    "phi3": ("logits_via_embedding=false",),
    "gpt2": (
        "logits_via_embedding=true",
        "mlp_activations=gelu",
        "trainable_position_size=32",
        "attention_bias=true",
        "normalization_layer_epsilon=1e-5",
    ),
}

KEYS_OF_RUN = (
    "model_name=auto",
    "dataset_type=synthetic",
    "steps=2",
    "max_target_length=16",
    "per_device_batch_size=1",
    "eval_interval=-1",
    "generate_prompt=",
    UNSAVED,
)


def random_folder(folder: Path, decoder_block: str) -> Path:
    config = load_config(
        overrides=[
            f"decoder_block={decoder_block}",
            "max_target_length=16",
            *SIZES,
            *KEYS[decoder_block],
        ]
    )
    shapes = tensor_shapes(parameter_places(config.model, abstract_model(config.decoder)[1]))
    rng = np.random.default_rng(0)
    folder.mkdir()
    arrays = (rng.normal(size=shape).astype(np.float32) for shape in shapes.values())
    write_tensors(folder / "model.safetensors", "F32", shapes, arrays)
    (folder / "config.json").write_text(json.dumps(config_json(config, "float32", {})))
    return folder


@pytest.mark.parametrize(
    ("decoder_block", "axes"),
    [
        ("llama2", {"fsdp": 8}),
        ("llama2", {"fsdp": 3}),
        ("llama2", {"tensor": 2, "fsdp": 2, "data": 2}),
        ("phi3", {"tensor": 2, "fsdp": 2}),
        ("gpt2", {"pipeline": 2, "fsdp": 2}),
    ],
)
def test_every_row_is_read_once_and_reaches_the_devices_that_hold_it(
    decoder_block: str, axes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_folder(tmp_path / "model", decoder_block)
    overrides = [
        "ici_fsdp_parallelism=1",
        *(f"ici_{axis}_parallelism={size}" for axis, size in axes.items()),
    ]
    overrides += ["weight_dtype=bfloat16", "max_target_length=16"]
    mesh = make_mesh(
        load_config(overrides=overrides), jax.devices()[: int(np.prod(list(axes.values())))]
    )
    config, _, expected = load_parameters(folder, overrides, mesh)
    abstract = abstract_model(config.decoder)[1]
    stored, places = stored_tensors(folder), parameter_places(config.model, abstract)
    count: Counter[str] = Counter()
    names = {tensor.offset: name for name, tensor in stored.items()}
    rows = StoredTensor.rows

    def counted(tensor: StoredTensor, first: int, last: int) -> np.ndarray:
        count[names[tensor.offset]] += last - first
        return rows(tensor, first, last)

    monkeypatch.setattr(StoredTensor, "rows", counted)
    shardings = jax.tree.leaves(parameter_shardings(abstract, mesh))
    wanted = {}
    for (path, parameter), sharding in zip(
        jax.tree.leaves_with_path(expected), shardings, strict=True
    ):
        place = places[parameter_path(path)]
        if len(place.part_shape) < 2:
            continue
        shape = jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=sharding)
        found = read_shared(stored, place, shape)
        assert found.sharding == parameter.sharding
        np.testing.assert_array_equal(np.asarray(found), np.asarray(parameter), err_msg=str(path))
        # Parameters that are columns of one tensor each read its rows.
        readings = (
            len(place.layout.joined) if place.layout.joined and place.layout.joined_axis == 1 else 1
        )
        wanted |= {name: readings * stored[name].shape[0] for name in place.names}
    assert count == wanted and len(wanted) > 2


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"pipeline": 2, "tensor": 2, "fsdp": 2}])
def test_no_device_has_a_whole_tensor_while_they_exchange_it(axes: dict[str, int]) -> None:
    sizes = ["base_emb_dim=64", "base_mlp_dim=256", "base_num_decoder_layers=2"]
    config = load_config(
        overrides=[*sizes, *(f"ici_{axis}_parallelism={size}" for axis, size in axes.items())]
    )
    mesh, abstract = make_mesh(config), abstract_model(config.decoder)[1]
    place = parameter_places(config.model, abstract)["layers", "mlp", "gate"]
    sharding = parameter_shardings(abstract, mesh)["layers"]["mlp"]["gate"].get_value()
    exchange = exchange_of(place, sharding, 3)
    whole = jax.ShapeDtypeStruct((2, *place.shape), np.float32, sharding=sharding)
    rows = jax.ShapeDtypeStruct(place.part_shape, np.float32, sharding=exchange[0])
    compiled = adder_of(place, sharding, exchange).lower(whole, rows, np.int32(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.6 * math.prod(place.part_shape) * 4


def contents_read(store: Store) -> list[int]:
    """Returns the bytes of each request for the content of the model's tensors."""
    content = r"^GET .*model\.safetensors" + (r".*alt=media" if store.scheme == "gs" else "$")
    return [
        size
        for _, method, path, size, _ in store.requests()
        if re.search(content, f"{method} {path}")
    ]


@pytest.mark.slow
@on("gs")
def test_two_hosts_together_fetch_a_model_once(store: Store, tmp_path: Path) -> None:
    bucket = store.bucket()
    folder = random_folder(tmp_path / "model", "llama2")
    there = f"{bucket}/model"
    assert main(["export", str(folder), "--output", there]) == 0
    one, two = (
        load_config(
            overrides=[*KEYS_OF_RUN, f"load_parameters_path={path}", f"run_dir={tmp_path / name}"]
        )
        for path, name in ((folder, "one"), (there, "two"))
    )
    train(one, jax.devices()[:2])
    store.forget()
    run(lambda _: train(two), devices=2, hosts=2, timeout=600)
    losses = [[line["loss"] for line in read_metrics(config.run_dir)] for config in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    file = (folder / "model.safetensors").read_bytes()
    header = int.from_bytes(file[:8], "little")
    # Every host reads the header; a store's description of the object, which is not asked with
    # `alt=media` of Google's, and its answers about the index that is not there do not count
    # either.
    read = contents_read(store)
    of_tensors = [size for size in read if size not in (8, header)]
    total = len(file) - 8 - header
    assert total <= sum(of_tensors) <= 1.3 * total, read


def test_a_folder_in_a_store_is_identified_unread_and_its_copies_as_the_same(
    store: Store, tmp_path: Path
) -> None:
    here, there = random_folder(tmp_path / "model", "llama2"), f"{store.bucket()}/model"
    assert main(["export", str(here), "--output", there]) == 0
    (tmp_path / "copy").mkdir()
    for file in as_path(there).iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    remote, copy = HuggingFaceFolder(there), HuggingFaceFolder(tmp_path / "copy")
    store.forget()
    pinned = remote.identity
    assert contents_read(store) == []
    assert copy.identity_like(pinned) == pinned == remote.identity_like(pinned)
    assert remote.identity_like(copy.identity) == copy.identity != pinned
    with (tmp_path / "copy" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)
        weights.seek(-1, 2)
        weights.write(bytes([last[0] ^ 1]))
    assert copy.identity_like(pinned) != pinned
