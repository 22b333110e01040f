"""Generation: draws, stops, and a single compilation."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch import load_config, load_model
from maxbatch.around.sampling.sampler import SamplingRules, jit_responses
from maxbatch.around.sampling.text import generate_text
from maxbatch.cli import main
from maxbatch.config.config import Config
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.model.decoder import Decoder
from maxbatch.system.errors import TrainingError
from tests.helpers.huggingface_folders import write_folder
from tests.helpers.policies import trained_to_say
from tests.helpers.tiny import LENGTH, TINY_MODEL

CONFIG = load_config(overrides=[*TINY_MODEL, "logits_via_embedding=false"])
NO_BOS = load_config(overrides=[*TINY_MODEL, "logits_via_embedding=false", "add_bos=false"])
TOKENIZER = ByteTokenizer()


RANDOM = nnx.state(Decoder(CONFIG.decoder, rngs=nnx.Rngs(params=0)), nnx.Param)


def text(
    params: nnx.State = RANDOM,
    prompt: str = "def ",
    n: int = 8,
    config: Config = CONFIG,
    **rules: Any,
) -> str:
    rules = {"temperature": 1.0, "max_new_tokens": n} | rules
    return generate_text(params, TOKENIZER, prompt, config.text, SamplingRules(**rules))


def test_one_seed_one_text_and_another_seed_another() -> None:
    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed) for seed in range(4)}) > 1
    assert text(seed=1).startswith("def ")


def test_temperature_zero_and_top_one_take_the_likeliest_token_whatever_the_seed() -> None:
    greedy = {text(temperature=0.0, seed=seed) for seed in range(3)}
    assert len(greedy) == 1
    assert {text(top_k=1, seed=seed) for seed in range(3)} == greedy


@pytest.mark.runs
@pytest.mark.parametrize("prompt", ["abc", string.ascii_letters[: LENGTH - 2]])
def test_the_likeliest_token_is_that_of_the_model_that_sees_the_whole_prompt(prompt: str) -> None:
    decoder = Decoder(CONFIG.decoder, rngs=nnx.Rngs(params=0))
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
    tokens = jnp.asarray([ids])
    x = decoder.hidden(tokens, jnp.ones_like(tokens)).x_MxLxD[0, -1]
    logits = x @ decoder.output_projection()
    assert text(prompt=prompt, n=1, temperature=0.0) == TOKENIZER.decode(
        [*ids, int(jnp.argmax(logits[:256]))]
    )


def test_top_k_draws_from_the_k_likeliest_alone() -> None:
    params = trained_to_say(CONFIG, (ord("a"), 3.0), (ord("b"), 2.5), (ord("c"), 2.0))
    assert set(text(params, prompt="", n=40, top_k=2, temperature=5.0)) == {"a", "b"}
    assert len(set(text(params, prompt="", n=40, temperature=5.0))) > 3


def test_the_nucleus_is_the_fewest_likeliest_that_have_the_probability() -> None:
    # 0.67, 0.24, 0.09
    params = trained_to_say(CONFIG, (ord("a"), 30.0), (ord("b"), 29.0), (ord("c"), 28.0))
    for nucleus_p, drawn in ((0.6, "a"), (0.8, "ab"), (0.95, "abc")):
        assert set(text(params, prompt="", n=60, nucleus_p=nucleus_p)) == set(drawn)


def test_it_stops_at_the_end_of_the_document() -> None:
    assert text(trained_to_say(CONFIG, (TOKENIZER.eos_id, 50.0)), prompt="ab") == "ab"


def test_ids_that_are_no_text_are_never_drawn() -> None:
    beyond = [(i, 50.0) for i in range(TOKENIZER.vocab_size, CONFIG.vocab_size)]
    special = [(TOKENIZER.bos_id, 50.0), (TOKENIZER.pad_id, 50.0)]
    said = text(trained_to_say(CONFIG, *beyond, *special, (ord("x"), 40.0)), prompt="", n=5)
    assert said == "xxxxx"


class Latin1(ByteTokenizer):
    """A character for every byte, and no other tokens."""

    vocab_size, bos_id, eos_id, pad_id = 256, None, None, 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(list(ids)).decode("latin-1")


def test_a_full_window_goes_on_from_its_last_half() -> None:
    def said(prompt: str, n: int) -> str:
        return generate_text(
            RANDOM, Latin1(), prompt, NO_BOS.text, SamplingRules(0.0, max_new_tokens=n)
        )

    whole = said("def ", 2 * LENGTH)
    assert len(whole) == len("def ") + 2 * LENGTH
    half = LENGTH // 2
    for full in (LENGTH, LENGTH + half):
        assert whole[full - half : full + half] == said(whole[full - half : full], half)


def test_a_prompt_that_fills_the_window_is_seen_by_its_last_half() -> None:
    said = partial(
        generate_text, RANDOM, Latin1(), config=NO_BOS.text, rules=SamplingRules(max_new_tokens=4)
    )
    half = string.ascii_letters[: LENGTH // 2]
    for start in ("x" * (LENGTH // 2), "some other start of a document, "):
        assert said(start + half) == start + said(half)


def test_every_window_and_every_token_has_draws_of_its_own() -> None:
    half = LENGTH // 2
    rules = SamplingRules(max_new_tokens=4 * LENGTH)
    said = generate_text(trained_to_say(CONFIG), Latin1(), "x", NO_BOS.text, rules)[LENGTH:]
    assert len({said[i : i + half] for i in range(0, len(said) - half, half)}) == 6
    assert len(set(said)) > 50  # and so has every token


def test_a_conversation_begins_as_the_tokenizer_has_it_whatever_add_bos_says() -> None:
    tuned = load_config(
        overrides=[*TINY_MODEL, "logits_via_embedding=false", "dataset_type=jsonl", "use_sft=true"]
    )
    assert text(config=tuned) == text(config=NO_BOS) != text()


def test_a_prompt_of_an_imported_model_begins_as_its_tokenizer_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "model")
    monkeypatch.setattr(
        "maxbatch.around.sampling.text.generate_text", lambda *arguments: str(arguments[3].add_bos)
    )
    assert main(["generate", str(folder), "--prompt", "a"]) == 0
    assert capsys.readouterr().out == "False\n"  # bytes have no rules of their own


def test_a_stated_add_bos_holds_for_an_imported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model")
    monkeypatch.setattr(
        "maxbatch.around.loaded_model.generate_text", lambda *arguments: str(arguments[3].add_bos)
    )
    monkeypatch.setattr("maxbatch.around.loaded_model.check_vocabulary", lambda *_: None)
    assert load_model(folder).generate("a") == "False"
    assert load_model(folder, add_bos=True).generate("a") == "True"


def test_a_text_ends_where_the_imported_model_states_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says_a = trained_to_say(CONFIG, (ord("a"), 9.0))
    assert text(says_a, "x", n=3, temperature=0.0) == "xaaa"
    assert text(says_a, "x", n=3, temperature=0.0, end_ids=(ord("b"), ord("a"))) == "x"
    folder = write_folder(tmp_path / "model")
    monkeypatch.setattr(
        "maxbatch.around.sampling.text.generate_text", lambda *arguments: str(arguments[4].end_ids)
    )
    for stated, said in (None, "(2,)"), ({"eos_token_id": [2, 7]}, "(2, 7)"), ({}, "()"):
        if stated is not None:
            (folder / "generation_config.json").write_text(json.dumps(stated))
        assert main(["generate", str(folder), "--prompt", "a"]) == 0
        assert capsys.readouterr().out == f"{said}\n"


def test_an_empty_prompt_starts_a_document() -> None:
    with_bos = text(prompt="", n=4, temperature=0.0)
    assert text(prompt="", n=4, temperature=0.0, config=NO_BOS) == with_bos


def test_one_compilation_serves_every_prompt_length_and_setting() -> None:
    text(top_k=3)
    before = jit_responses._cache_size()
    text(prompt="another, longer", n=3, temperature=0.3, top_k=5, nucleus_p=0.9, seed=9)
    text(prompt="a", n=2 * LENGTH, temperature=0.0, nucleus_p=0.5)
    assert jit_responses._cache_size() == before


@pytest.mark.parametrize("prompt", ["a\0b", "a\ud800b"])
@pytest.mark.parametrize("place", ["--prompt", "run_dir"])
def test_a_prompt_or_path_that_is_not_text_is_one_line(
    place: str, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "generate",
                *(("no/such/run", "--prompt", prompt) if place == "--prompt" else (prompt,)),
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be UTF-8 text without NUL characters" in line


def test_parameters_may_be_sharded() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.device_put(RANDOM, jax.NamedSharding(mesh, jax.P()))
    sharded = jax.tree.map(
        lambda x: jax.device_put(
            x, jax.NamedSharding(mesh, jax.P(*(None,) * (x.ndim - 1), "fsdp"))
        ),
        whole,
    )
    assert text(sharded, temperature=0.0) == text(temperature=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_whose_weights_are_not_finite_gives_no_text(value: float) -> None:
    damaged = jax.tree.map(lambda x: x.at[...].set(value), RANDOM)
    with pytest.raises(TrainingError, match="gives no token a finite log-probability"):
        text(damaged)
