"""Rollouts: where a response ends."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxbatch import load_config
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.kinds.prompt.prompts import Prompt
from maxbatch.kinds.prompt.rollout import Roller
from maxbatch.parallel.mesh import make_mesh
from tests.helpers.huggingface_folders import write_folder
from tests.helpers.policies import trained_to_say
from tests.helpers.tiny import TINY_MODEL


def test_a_response_ends_where_the_imported_model_states_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ord("b")]}))
    model = [*TINY_MODEL, "logits_via_embedding=false", "max_prefill_predict_length=4"]
    config = load_config(overrides=[*model, f"load_parameters_path={folder}"])
    mesh = make_mesh(config, jax.devices()[:1])
    roller = Roller(config.rollout, ByteTokenizer(), mesh, num_pairs=2)
    prompt = Prompt(0, "x", np.array([ord("x")], np.int32), {})
    says_b = roller.take(
        jax.device_put(
            trained_to_say(config, (ord("b"), 9.0)), NamedSharding(mesh, PartitionSpec())
        )
    )
    drawn = roller.read([prompt], 2, roller.start(says_b, [prompt], 2, temperature=0.0))
    assert (drawn.texts, drawn.lengths_R.tolist(), drawn.mask_RxL.sum()) == (["", ""], [2, 2], 2)
