from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.config.config import Config
from maxbatch.config.rules import check_vocabulary
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer, check_special_tokens, make_tokenizer


@pytest.mark.parametrize("text", ["", "plain", "tab\tline\n\r\n", "żółw 🐢 汉字", "\x00\x7f"])
def test_bytes_lose_nothing(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).tolist() == list(text.encode())


def test_special_tokens_and_ids_beyond_the_vocabulary_vanish_in_text() -> None:
    tokenizer = ByteTokenizer()
    ids = [tokenizer.bos_id, ord("a"), tokenizer.eos_id, tokenizer.pad_id, 263, ord("b")]
    assert tokenizer.decode(ids) == "ab"
    assert sorted({tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}) == [256, 257, 258]
    assert tokenizer.vocab_size == 259


def test_a_torn_character_is_shown_not_raised() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("aż")[:-1]) == "a\ufffd"


def test_ids_are_int32() -> None:
    assert ByteTokenizer().encode("abc").dtype == np.int32


def tokenizer_in(config: Config) -> Tokenizer:
    return make_tokenizer(config.tokenizer_type, config.tokenizer_path)


def test_a_vocabulary_too_small_names_both_sizes() -> None:
    config = load_config(overrides=["vocab_size=258"])
    with pytest.raises(ConfigError, match=r"vocab_size=258.*259"):
        check_vocabulary(config, tokenizer_in(config).vocab_size)
    exact = load_config(overrides=["vocab_size=259"])
    check_vocabulary(exact, tokenizer_in(exact).vocab_size)


def test_a_tokenizer_file_that_nothing_would_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_path='x\.json'"):
        make_tokenizer("byte", "x.json")


# --- tokenizers that are files -----------------------------------------------------------------------------------


def write_bpe(folder: Path, *special: str, **settings: Any) -> Path:
    """A byte-level BPE `tokenizer.json` with a template that would add tokens, and with padding and
    truncation on.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    if special:
        pair = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{special[0]} $A", special_tokens=[pair]
        )
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(3)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def write_without_unk_token(folder: Path) -> Path:
    """A word-level `tokenizer.json` that knows "a" and "b", and names an unk_token that it
    lacks.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_sentencepiece(path: Path, **options: Any) -> Path:
    import sentencepiece

    with open(path, "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 20),
            model_writer=model,
            vocab_size=60,
            hard_vocab_limit=False,
            byte_fallback=False,
            minloglevel=2,
            **options,
        )
    return path


def tokenizer_of(kind: str, path: Path | str, *overrides: str) -> Tokenizer:
    return tokenizer_in(
        load_config(overrides=[f"tokenizer_type={kind}", f"tokenizer_path={path}", *overrides])
    )


def test_a_hugging_face_tokenizer_adds_and_cuts_nothing(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("huggingface", write_bpe(tmp_path, "<s>", "</s>"))
    for text in ("", "the quick brown fox jumps", "żółw 🐢", "tab\t\r\n", "</s><s>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and ids.dtype == np.int32
        assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids, "text is text"
    batch = tokenizer.encode_utf8_batch([b"the fox", b"", b"dog"])
    assert [tokenizer.decode(ids) for ids in batch] == ["the fox", "", "dog"]
    assert (
        tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("fox"), tokenizer.eos_id, 10**6])
        == "fox"
    )


@pytest.mark.parametrize(
    ("special", "settings", "bos", "eos", "pad"),
    [
        (("<s>", "</s>"), {}, 0, 1, 1),
        (("<pad>", "<s>", "</s>"), {}, 1, 2, 0),
        (("<|endoftext|>",), {}, 0, 0, 0),
        (("<|begin_of_text|>", "<|end_of_text|>"), {}, 0, 1, 1),
        (("<|endoftext|>",), {"bos_token": None, "eos_token": "<|endoftext|>"}, None, 0, 0),
        (("A!", "B!"), {"bos_token": {"content": "B!"}, "eos_token": "A!"}, 1, 0, 0),
        ((), {}, None, None, 0),
    ],
)
def test_special_tokens_are_found_by_their_usual_names_or_as_the_config_beside_says(
    tmp_path: Path, special: tuple[str, ...], settings: dict[str, Any], bos: int, eos: int, pad: int
) -> None:
    tokenizer = tokenizer_of("huggingface", write_bpe(tmp_path, *special, **settings))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (bos, eos, pad)


@pytest.mark.parametrize("key", ["add_bos", "add_eos"])
def test_a_special_token_that_does_not_exist_is_refused_with_the_setting_that_works(
    tmp_path: Path, key: str
) -> None:
    others = {"add_bos": "add_eos", "add_eos": "add_bos"}
    path = write_bpe(tmp_path)
    overrides = ["tokenizer_type=huggingface", f"tokenizer_path={path}", f"{others[key]}=false"]
    config = load_config(overrides=overrides)
    with pytest.raises(ConfigError, match=rf"{key}=true: .*; works: {key}=false"):
        check_special_tokens(config.store, tokenizer_in(config))
    works = load_config(overrides=[*overrides, f"{key}=false"])
    check_special_tokens(works.store, tokenizer_in(works))


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path: Path) -> None:
    path = write_bpe(tmp_path, "<s>", "</s>")
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": 999, "content": "<|far|>"}
    )
    tokenizer["model"]["vocab"]["<|far|>"] = 999
    path.write_text(json.dumps(tokenizer))
    assert tokenizer_of("huggingface", path).vocab_size == 1000
    config = load_config(
        overrides=["tokenizer_type=huggingface", f"tokenizer_path={path}", "vocab_size=999"]
    )
    with pytest.raises(ConfigError, match=r"vocab_size=999: .*1000 tokens; works: vocab_size=1000"):
        check_vocabulary(config, tokenizer_in(config).vocab_size)


def test_the_identity_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "a", "<s>", "</s>")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    identity = tokenizer_of("huggingface", path).identity
    assert tokenizer_of("huggingface", tmp_path / "b").identity == identity, "a folder with one"
    (tmp_path / "b/tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert tokenizer_of("huggingface", tmp_path / "b").identity != identity
    assert tokenizer_of("huggingface", write_bpe(tmp_path / "c", "<s>")).identity != identity


def test_a_sentencepiece_model_round_trips(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("sentencepiece", write_sentencepiece(tmp_path / "a.model"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    ids = tokenizer.encode("the lazy fox")
    assert tokenizer.decode([1, *ids, 2, 10**6]) == "the lazy fox" and not {1, 2} & set(
        ids.tolist()
    )
    assert max(ids) < tokenizer.vocab_size <= 60
    with_pad = write_sentencepiece(tmp_path / "b.model", pad_id=3, bos_id=-1)
    tokenizer = tokenizer_of("sentencepiece", with_pad)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 2, 3)


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_tokenizer_travels_to_another_process_as_its_path(tmp_path: Path, kind: str) -> None:
    path = {
        "huggingface": write_bpe,
        "sentencepiece": lambda folder: write_sentencepiece(folder / "a.model"),
    }[kind](tmp_path)
    tokenizer = tokenizer_of(kind, path)
    ids = tokenizer.encode("fox")
    packed = pickle.dumps(tokenizer)
    assert len(packed) < 1000
    assert pickle.loads(packed).encode("fox").tolist() == ids.tolist()
    tokenizer.file.write_bytes(tokenizer.file.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="has changed since this start hashed it"):
        pickle.loads(packed).encode("fox")
    assert pickle.loads(pickle.dumps(tokenizer)).identity == tokenizer.identity
    assert tokenizer.encode("fox").tolist() == ids.tolist(), (
        "this process has the content that was hashed"
    )


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer_path='': tokenizer_type=.* needs a file"):
        tokenizer_of(kind, "")
    with pytest.raises(ConfigError, match=r"tokenizer_path='none': no such file"):
        tokenizer_of(kind, "none")
    with pytest.raises(ConfigError, match="it holds none"):
        tokenizer_of(kind, tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"tokenizer_path=.*bad': not a"):
        tokenizer_of(kind, tmp_path / "bad").encode("x")


def test_an_unk_token_outside_of_the_vocabulary_is_one_line_once_it_is_needed(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_of("huggingface", write_without_unk_token(tmp_path))
    assert tokenizer.encode("a b").tolist() == [0, 1]
    with pytest.raises(
        ConfigError, match=r"tokenizer_path=.*\[UNK\].*unk_token must be in its vocabulary"
    ) as raised:
        tokenizer.encode("a c")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
@pytest.mark.parametrize("path", ["fifo", "folder", "/dev/zero", "a\0b", "a\ud800b"])
def test_a_tokenizer_that_is_no_file_is_one_line(tmp_path: Path, kind: str, path: str) -> None:
    os.mkfifo("fifo")
    os.mkdir("folder")
    os.mkfifo("folder/tokenizer.json")
    os.mkfifo("folder/a.model")
    with pytest.raises(
        ConfigError,
        match=r"tokenizer_path='.*': (no such file|must be a folder with a file|must be UTF-8 text)",
    ):
        tokenizer_of(kind, path)


@pytest.mark.parametrize("kind", ["byte", "huggingface"])
def test_a_text_with_half_of_a_surrogate_pair_is_one_line(tmp_path: Path, kind: str) -> None:
    path = "" if kind == "byte" else write_bpe(tmp_path)
    with pytest.raises(ConfigError, match=r"the text 'a\\udcff' cannot be encoded: character 1"):
        tokenizer_of(kind, path).encode("a\udcff")


@pytest.mark.parametrize(
    ("kind", "package"), [("huggingface", "tokenizers"), ("sentencepiece", "sentencepiece")]
)
def test_a_library_that_is_not_installed_names_the_extra_and_only_when_it_is_needed(
    tmp_path: Path, kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    tokenizer = tokenizer_of(kind, tmp_path / "file")
    assert tokenizer.identity.startswith(kind)
    with pytest.raises(
        ConfigError, match=rf"tokenizer_type={kind}: needs {package}.*maxbatch\[text\]"
    ):
        _ = tokenizer.vocab_size
