"""Names of the Hugging Face hub, from the cache of `huggingface_hub` and without a network."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.config import hub
from maxbatch.config.loading import load_config
from maxbatch.config.model_forms import end_tokens
from maxbatch.data.tokenizers.tokenizers import make_tokenizer
from maxbatch.run.weights.parameters import open_source
from maxbatch.system.errors import ConfigError
from tests.helpers.chats import write_tokenizer
from tests.helpers.huggingface_folders import write_folder

NAME = "someone/tiny-llama"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model that the cache holds under the name, and its folder elsewhere."""
    model = write_folder(tmp_path / "elsewhere")
    write_tokenizer(model)
    cached = Path(os.environ["HF_HOME"]) / "hub" / "models--someone--tiny-llama"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("c0ffee" * 6 + "c0ff")
    shutil.copytree(model, cached / "snapshots" / ("c0ffee" * 6 + "c0ff"))
    hub._lookup.cache_clear()
    yield model
    shutil.rmtree(cached)
    hub._lookup.cache_clear()


def test_a_hub_name_is_the_model_of_that_name_also_without_a_network(folder: Path) -> None:
    by_name = load_config(model_name="auto", load_parameters_path=NAME)
    by_folder = load_config(model_name="auto", load_parameters_path=str(folder))
    assert by_name.base_emb_dim == by_folder.base_emb_dim == 16
    assert (by_name.load_parameters_path, by_name.tokenizer_path) == (NAME, NAME)
    assert (
        make_tokenizer("huggingface", NAME).identity
        == make_tokenizer("huggingface", str(folder)).identity
    )
    assert open_source(NAME).identity == open_source(folder).identity
    assert end_tokens(NAME) == end_tokens(folder) == (2,)


def test_a_local_folder_wins_over_a_hub_name(folder: Path) -> None:
    Path("someone").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"tokenizer_path='someone/tiny-llama': no such file or folder \(seen from",
    ):
        make_tokenizer("huggingface", NAME)
    write_folder(Path(NAME), hidden_size=32)
    assert load_config(model_name="auto", load_parameters_path=NAME).base_emb_dim == 32


def test_a_hub_name_that_cannot_be_had_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "model_name=auto", "load_parameters_path=someone/other"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert (
        "load_parameters_path=someone/other: no such file or folder" in said
        and "Hugging Face hub" in said
    )
    assert said.count("\n") == 1
    assert (
        main(["generate", "someone/other"]) == 2 and "Hugging Face hub" in capsys.readouterr().err
    )
    hub._lookup.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for wrong in (command, ["data", "tokenizer_type=huggingface", f"tokenizer_path={NAME}"]):
        assert main(wrong) == 2
        said = capsys.readouterr().err
        assert "pip install 'maxbatch[text]'" in said and said.count("\n") == 1
