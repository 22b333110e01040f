"""Batches of prompts in any framework: chunk, lengths, rewards, sampling."""

from __future__ import annotations

from collections.abc import Sequence

from maxbatch.commands.import_config.translation import Translation
from maxbatch.plan.divisors import divisors

PROMPTS = "the most tokens of a prompt; a longer one is refused when the run starts"
_MOST = 2**31  # prompts, responses or tokens
PROBABILITIES = "the ratio is of probabilities at temperature 1 here, of the sampled ones there"


def whole(t: Translation, word: str) -> int | None:
    """Returns a word's value as a whole number from 1 to _MOST, or None."""
    number = t.number(word)
    return int(number) if number is not None and 1 <= number <= _MOST and number.is_integer() else None


def take_chunk(t: Translation, word: str, rows: int, shards: int, prompts: int, group: int) -> None:
    """Takes a word as the pairs of a chunk: whole groups, at most `rows` per shard.

    Args:
      t: the words.
      word: the word that states the rows.
      rows: pairs per shard in one pass of the other program.
      shards: parts of a batch.
      prompts: prompts per update.
      group: responses per prompt.
    """
    chunks = [divisor * group for divisor in divisors(prompts)]
    even = [pairs for pairs in chunks if pairs % shards == 0] or chunks
    within = [pairs for pairs in even if pairs <= rows * shards]
    pairs = within[-1] if within else even[0]
    why = f"{rows} rows x {shards}"
    if pairs != rows * shards:
        bound = "at most" if within else "more than"
        why = f"{bound} {why}, in whole groups of {group} that divide an update; the update does not depend on it"
    t.map(word, why, micro_batch_size=str(pairs))


def take_target_length(t: Translation, prompt: str, response: str, why: str = "") -> None:
    """Takes the bounds of a prompt and of a response; their sum bounds a row."""
    bounds = whole(t, prompt), whole(t, response)
    if bounds[0] is None or bounds[1] is None:
        for word, bound in zip((prompt, response), bounds, strict=True):
            if bound is None:
                t.refuse(word, "a number of tokens", is_essential=True)
        return
    if why:
        t.need(prompt, why, max_prefill_predict_length=str(bounds[0]))
    else:
        t.map(prompt, max_prefill_predict_length=str(bounds[0]))
    t.map(response, f"{prompt} + {response}", max_target_length=str(sum(filter(None, bounds))))


def take_rewards(t: Translation, word: str, file: str, functions: Sequence[str], weights: Sequence[str] = ()) -> None:
    """Takes the rewards, functions of the user, with optional `weights`, one per function."""
    reward = f"{file}:{functions[0]}"
    if len(functions) > 1 or weights:
        pairs = zip(functions, weights or ["1"] * len(functions), strict=True)
        reward = ";".join(f"{file}:{name},{weight}" for name, weight in pairs)
    step = f"{file} with {', '.join(functions)}(prompt, response, record), which returns a number"
    t.need(word, step, reward=reward)


def take_sampling(t: Translation, temperature: str, top_k: str, top_p: str) -> None:
    """Takes the sampling settings; -1 and null mean all tokens."""
    number = t.number(temperature)
    t.map(temperature, "" if number in (None, 1.0) else PROBABILITIES, decode_sampling_temperature=t.text(temperature))
    k = t.number(top_k)
    t.map(top_k, decode_sampling_top_k="0" if k is None or k < 0 else t.text(top_k))
    t.map(top_p, decode_sampling_nucleus_p=t.text(top_p))


def without_balance(t: Translation) -> None:
    """Switches off the router losses of a preset; reinforcement learning has none."""
    if "model_name" in t.settings:
        t.settings["load_balance_loss_weight"] = "0"
