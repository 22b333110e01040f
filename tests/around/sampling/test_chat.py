"""A conversation: ends of answers, notes on them, and truncation of long ones."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from maxbatch import ConfigError, load_config
from maxbatch.around.sampling.chat import Chat
from maxbatch.around.sampling.sampler import Sampler, SamplingRules
from maxbatch.commands.generate import print_answer
from maxbatch.data.tokenizers.chat_prompts import ChatPrompts
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer, make_tokenizer
from maxbatch.model.decoder import Decoder
from maxbatch.system.errors import TrainingError
from tests.helpers.chats import SPECIAL, write_tokenizer
from tests.helpers.policies import trained_to_say
from tests.helpers.tiny import LENGTH, TINY_MODEL

CONFIG = load_config(overrides=[*TINY_MODEL, "logits_via_embedding=false", "vocab_size=320"])
END, TEXT_END = SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")
GREEDY = SamplingRules(0.0, max_new_tokens=6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its end of text is not the end of a turn."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), eos_token="<|endoftext|>")
    return make_tokenizer("huggingface", str(folder))


def chat(
    tokenizer: Tokenizer, *likely: tuple[int, float], context: int = 128, system: str = ""
) -> Chat:
    params = trained_to_say(CONFIG, *likely)
    return Chat(params, tokenizer, CONFIG.decoder, GREEDY, context, system)


def test_a_turn_ends_where_the_template_ends_it(tokenizer: Tokenizer) -> None:
    prompts = ChatPrompts(tokenizer)
    assert prompts.end_ids == (END,)
    ids = prompts.ids([{"role": "user", "content": "a"}])
    assert tokenizer.decode_markup(ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert prompts.is_prompt(ids.tolist()) and not prompts.is_prompt(ids.tolist()[:-1])


def test_an_answer_that_ends_at_once_or_not_at_all_says_so(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    for likely, printed, note in (
        ((END, 50.0), "\n", "the answer is empty: the model ended its turn at once"),
        (
            (int(tokenizer.encode("x")[0]), 50.0),
            "xxxxxx\n",
            "the answer is cut off; --max-new-tokens",
        ),
    ):
        print_answer(chat(tokenizer, likely), "hi")
        found = capsys.readouterr()
        assert found.out == printed and note in found.err


def test_the_oldest_turns_make_room_and_the_message_of_the_system_stays(
    tokenizer: Tokenizer,
) -> None:
    talked = chat(tokenizer, (END, 50.0), context=LENGTH + 24, system="s")
    for number in range(3):
        assert list(talked.say(f"message {number}")) == []
    assert talked.forgotten > 0
    assert tokenizer.decode_markup(talked._prompt()).startswith("<|im_start|>system\ns<|im_end|>")
    with pytest.raises(
        ConfigError,
        match="tokens with the chat template, and the model reads at most 56; works: a sh",
    ):
        list(talked.say("word " * 40))
    # what was refused has pushed nothing out
    assert list(talked.say("again")) == [] and talked.forgotten < 8


@pytest.mark.runs
def test_the_pieces_of_a_response_are_the_response() -> None:
    params = nnx.state(Decoder(CONFIG.decoder, rngs=nnx.Rngs(params=0)), nnx.Param)
    sampler = Sampler(CONFIG.decoder, ByteTokenizer(), None, prompt_length=4, rescores=False)
    rows = sampler.rows([[97, 98, 99]], [(5, 0, 1)])
    for most in (1, 9, 100):
        rules = SamplingRules(1.0, top_k=7, seed=3, max_new_tokens=most)
        growing = sampler.growing(params, rows, rules, piece_tokens=4)
        *before, last = ([*response] for (response,) in growing)
        whole = jax.device_get(sampler(params, rows, rules))
        assert last == whole.tokens_BxL[0, 3 : whole.lengths_B[0]].tolist()
        assert before == [last[:read] for read in range(0, len(last), 4)]
    broken = jax.tree.map(lambda x: x.at[...].set(float("nan")), params)
    with pytest.raises(TrainingError, match="gives no token a finite log-probability"):
        list(sampler.growing(broken, rows, rules, piece_tokens=4))
