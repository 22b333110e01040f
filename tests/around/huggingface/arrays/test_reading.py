"""The files of a Hugging Face folder are read as they were hashed, however much later."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax
import pytest

from maxbatch import ConfigError
from maxbatch.around.huggingface.arrays.reading import HuggingFaceFolder
from maxbatch.run.weights.parameters import placed
from maxbatch.update.state import abstract_model
from tests.helpers.huggingface_folders import write_folder


@pytest.mark.parametrize("is_hashed", [True, False])
def test_a_file_that_is_replaced_before_it_is_read_is_named(
    tmp_path: Path, is_hashed: bool
) -> None:
    folder = write_folder(tmp_path / "hf")
    source = HuggingFaceFolder(folder)
    if is_hashed:
        assert source.identity
    config = source.config(["max_target_length=16"])
    abstract = placed(abstract_model(config.decoder)[1], jax.devices()[0])
    read = source.open(config.model, abstract)
    read(abstract)
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    (tmp_path / "new").write_bytes(content)
    os.replace(tmp_path / "new", file)
    with pytest.raises(ConfigError, match=r"\.safetensors: has changed since this start hashed it"):
        read(abstract)


def test_a_file_that_is_copied_onto_itself_is_read(tmp_path: Path) -> None:
    """Its times and inode are others, and its content is hashed again."""
    folder = write_folder(tmp_path / "hf")
    source = HuggingFaceFolder(folder)
    identity = source.identity
    config = source.config(["max_target_length=16"])
    abstract = placed(abstract_model(config.decoder)[1], jax.devices()[0])
    read = source.open(config.model, abstract)
    file = next(folder.glob("*.safetensors"))
    shutil.copy(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)
    read(abstract)
    assert source.identity == identity
