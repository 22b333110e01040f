"""MaxText's checkpoints: every family's names, layers scanned or not, chunks of any mesh,
damages.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch import load_config
from maxbatch.around.maxtext.checkpoints import exchange
from maxbatch.around.maxtext.checkpoints.folder import open_items
from maxbatch.around.maxtext.checkpoints.names import FAMILIES_OF_MAXTEXT, places_of
from maxbatch.around.maxtext.checkpoints.reading import MaxTextCheckpoint
from maxbatch.around.maxtext.checkpoints.stored import StoredArray, open_arrays
from maxbatch.around.maxtext.export import ScannedNames, arrays_there, nested
from maxbatch.config.config import Config
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.trees import State
from maxbatch.system.errors import ConfigError
from tests.helpers.maxtext_checkpoints import (
    abstract_params,
    random_like,
    unscanned,
    write_checkpoint,
)

TINY = (
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=16",
    "base_mlp_dim=48",
    "base_num_decoder_layers=4",
    "vocab_size=64",
    "max_target_length=16",
    "logits_via_embedding=false",
)
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=24")
OF_FAMILY = {
    "mixtral": ("norm_topk_prob=true", *EXPERTS),
    "qwen3": ("use_qk_norm=true",),
    "qwen3_moe": ("use_qk_norm=true", *EXPERTS),
    "qwen2": ("attention_bias=true",),
    "gemma3": ("use_qk_norm=true", "base_num_decoder_layers=8"),
    "gpt_oss": ("attention_bias=true", "norm_topk_prob=true", *EXPERTS),
    "olmo3": ("use_qk_norm=true",),
    "deepseek": (
        *EXPERTS,
        "first_num_dense_layers=1",
        "shared_experts=1",
        "q_lora_rank=8",
        "kv_lora_rank=8",
        "qk_nope_head_dim=16",
        "qk_rope_head_dim=8",
        "v_head_dim=16",
        "base_num_kv_heads=4",
        "routed_bias=true",
    ),
}


def config_of(family: str, *overrides: str) -> Config:
    return load_config(
        overrides=[*TINY, f"decoder_block={family}", *OF_FAMILY.get(family, ()), *overrides]
    )


def theirs(config: Config, params: State) -> dict[str, dict]:
    return nested(arrays_there(params, places_of(config.model, ScannedNames()), None))


def assert_equal(read: State, params: State) -> None:
    for (keys, value), other in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(read), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(other), np.asarray(value), err_msg=".".join(parameter_path(keys))
        )


def read_all(path: Path, config: Config, abstract: State) -> State:
    return MaxTextCheckpoint(path).open(config.model, abstract)(abstract)


@pytest.mark.parametrize("family", sorted(FAMILIES_OF_MAXTEXT))
def test_every_family_is_read_as_it_was_written(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    abstract = abstract_params(config)
    params = random_like(abstract)
    path = write_checkpoint(tmp_path, theirs(config, params))

    read = read_all(path, config, abstract)

    if family.startswith("gemma"):  # norms of 1 + scale are rounded once
        for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    else:
        assert_equal(read, params)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_gemmas_factors_are_read_to_the_bit_where_the_weights_hold_them(
    family: str, tmp_path: Path
) -> None:
    scaled = "query_weights_scaled=true" if family != "gemma3" else "query_weights_scaled=false"
    config = config_of(family, "gemma_weights_scaled=true", scaled)
    abstract = abstract_params(config)
    params = random_like(abstract)
    path = write_checkpoint(tmp_path, theirs(config, params))
    assert_equal(read_all(path, config, abstract), params)


@pytest.mark.parametrize("family", ["llama2", "mixtral"])
def test_layers_that_are_not_scanned_are_read(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    abstract = abstract_params(config)
    params = random_like(abstract)
    path = write_checkpoint(tmp_path, unscanned(theirs(config, params)))
    assert_equal(read_all(path, config, abstract), params)


def test_interleaved_heads_of_llama_3_1_become_halves(tmp_path: Path) -> None:
    config = config_of("llama2", "rope_type=llama3.1", "rope_factor=8")
    abstract = abstract_params(config)
    params = random_like(abstract)
    arrays = theirs(config, params)
    path = write_checkpoint(tmp_path, arrays)

    assert_equal(read_all(path, config, abstract), params)

    stored = arrays["decoder"]["layers"]["self_attention"]["key"]["kernel"]
    ours = np.asarray(params["layers"]["attention"]["key"].get_value())
    np.testing.assert_array_equal(stored[:, 0, :, 0::2], ours[0, :, :, :8])
    np.testing.assert_array_equal(stored[:, 0, :, 1::2], ours[0, :, :, 8:])


def test_a_checkpoint_that_a_mesh_wrote_in_parts_is_read_onto_another(tmp_path: Path) -> None:
    config = config_of("llama2")
    abstract = abstract_params(config)
    params = random_like(abstract)
    wrote = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def in_parts(x: np.ndarray) -> jax.Array:
        spec = P("a", None, "b") if x.ndim == 3 else P("a") if x.shape[0] % 2 == 0 else P()
        return jax.device_put(x, NamedSharding(wrote, spec))

    path = write_checkpoint(tmp_path, jax.tree.map(in_parts, theirs(config, params)))
    name = "params.params.decoder.layers.mlp.wi_0.kernel"
    assert len(open_arrays(open_items(str(path), "k"), [name])[name].chunks) == 4

    reads = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(reads, P(None, "fsdp") if len(x.shape) > 2 else P()),
        ),
        abstract,
    )
    assert_equal(read_all(path, config, placed), params)


def test_a_part_of_the_parameters_is_read_alone(tmp_path: Path) -> None:
    from flax import nnx

    config = config_of("llama2")
    abstract = abstract_params(config)
    params = random_like(abstract)
    checkpoint = MaxTextCheckpoint(write_checkpoint(tmp_path, theirs(config, params)))
    reader = checkpoint.open(config.model, abstract)
    part = nnx.from_flat_state(
        [item for item in nnx.to_flat_state(abstract) if item[0][0] == "embedding"]
    )
    assert_equal(
        reader(part),
        nnx.from_flat_state([i for i in nnx.to_flat_state(params) if i[0][0] == "embedding"]),
    )


@pytest.mark.parametrize("named", ["run", "checkpoints", "step", "items"])
def test_a_run_its_checkpoints_and_their_items_name_the_newest(named: str, tmp_path: Path) -> None:
    config = config_of("llama2")
    params = theirs(config, random_like(abstract_params(config)))
    write_checkpoint(tmp_path, params)
    newest = write_checkpoint(tmp_path, params, step=12, moments=(params, params))
    path = {
        "run": tmp_path,
        "checkpoints": tmp_path / "checkpoints",
        "step": newest.parent,
        "items": newest,
    }[named]
    checkpoint = MaxTextCheckpoint(path)
    assert (checkpoint.step, checkpoint.updates) == (11, 12)


def test_pieces_of_a_chunk_in_order_are_its_values_in_order() -> None:
    for shape, most in [((5, 3, 7), 10), ((64,), 7), ((3, 5), 1), ((4, 4), 100), ((2, 9, 2), 4)]:
        sides = exchange.piece_sides(shape, most)
        assert np.prod(sides) <= most
        array = StoredArray("a", shape, np.dtype(np.float32), shape, None, "key=path", None)
        values = np.arange(np.prod(shape)).reshape(shape)
        pieces = [
            values[tuple(slice(*span) for span in piece)]
            for piece in array.pieces_of(array.chunks[0], sides)
        ]
        np.testing.assert_array_equal(
            np.concatenate([piece.reshape(-1) for piece in pieces]), values.reshape(-1)
        )


DAMAGES = {
    "no items": lambda items: shutil.rmtree(items),
    "no metadata": lambda items: (items / "_METADATA").unlink(),
    "metadata cut": lambda items: (items / "_METADATA").write_bytes(
        (items / "_METADATA").read_bytes()[:300]
    ),
    "metadata of another form": lambda items: (items / "_METADATA").write_text("[1, 2]"),
    "metadata names nothing": lambda items: (items / "_METADATA").write_text(
        '{"tree_metadata": {}}'
    ),
    "metadata is no JSON": lambda items: (items / "_METADATA").write_bytes(b"\xff\x00"),
    "no manifest": lambda items: [file.unlink() for file in items.rglob("manifest.ocdbt")],
    "manifest cut": lambda items: [
        file.write_bytes(file.read_bytes()[:20]) for file in items.rglob("manifest.ocdbt")
    ],
    "data cut": lambda items: [
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for file in items.rglob("d/*")
    ],
    "data gone": lambda items: [file.unlink() for file in items.rglob("d/*")],
    "data overwritten": lambda items: [
        file.write_bytes(b"\x5a" * file.stat().st_size) for file in items.rglob("d/*")
    ],
    "an emergency checkpoint": lambda items: (items.parent / "process_metadata").mkdir(),
    "a name without an array": lambda items: _rename_in_metadata(items, "'wo'", "'w_other'"),
}


def _rename_in_metadata(items: Path, old: str, new: str) -> None:
    metadata = json.loads((items / "_METADATA").read_text())
    metadata["tree_metadata"] = {
        key.replace(old, new): value for key, value in metadata["tree_metadata"].items()
    }
    (items / "_METADATA").write_text(json.dumps(metadata))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(damage: str, tmp_path: Path) -> None:
    config = config_of("llama2", "base_num_decoder_layers=1")
    abstract = abstract_params(config)
    path = write_checkpoint(tmp_path, theirs(config, random_like(abstract)))
    DAMAGES[damage](path)
    with pytest.raises(ConfigError) as caught:
        read_all(path.parent, config, abstract)
    assert "\n" not in str(caught.value) and "load_parameters_path=" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("base_emb_dim=64", r"token_embedder.embedding is \(64, 32\) there, \(64, 64\) here"),
        ("base_num_decoder_layers=2", "has 4 layers there, 2 here"),
        ("base_num_decoder_layers=8", "has 4 layers there, 8 here"),
        ("logits_via_embedding=true", "nothing here takes its decoder.logits_dense.kernel"),
        ("decoder_block=olmo3", "has no array for"),
        ("decoder_block=gpt2", "MaxText's checkpoints are read for"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(
    override: str, why: str, tmp_path: Path
) -> None:
    config = config_of("llama2")
    path = write_checkpoint(tmp_path, theirs(config, random_like(abstract_params(config))))
    other = config_of("llama2", *(["head_dim=8"] if "gpt2" in override else []), override)
    with pytest.raises(ConfigError, match=why):
        read_all(path, other, abstract_params(other))
