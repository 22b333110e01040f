"""A model in memory: texts that it continues, and the log-probabilities that it gives to records.

Shapes: n tokens of a record.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, overload

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from maxbatch.around.huggingface.folder.config_json import is_huggingface_folder
from maxbatch.around.sampling.completions import Completer
from maxbatch.around.sampling.sampler import SamplingRules
from maxbatch.around.sampling.text import generate_text
from maxbatch.around.scoring import Scorer
from maxbatch.config.base_path import stated_base
from maxbatch.config.config import Config
from maxbatch.config.loading import override_texts
from maxbatch.config.model_forms import context_length, end_tokens
from maxbatch.config.rules import check_vocabulary
from maxbatch.config.values import shown_fields
from maxbatch.data.store.cache_folder import cache_folder
from maxbatch.data.store.duplicates import record_digest
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import tokenizer_of
from maxbatch.kinds.conversation.messages import kind_of_value
from maxbatch.kinds.conversation.records import Conversations
from maxbatch.parallel.absent_tpu import leave_out_absent_tpu
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.trees import State
from maxbatch.plan.mesh_shape import AXES, axis_key
from maxbatch.run.compile.cache import use_persistent_cache
from maxbatch.run.folder.json_file import finite
from maxbatch.run.own import MakeModel, Parts, check_parts, module_maker, name_of
from maxbatch.run.weights.parameters import open_checkpoint, open_source, placed, restored
from maxbatch.system.code_names import code_name
from maxbatch.system.errors import ConfigError, TrainingError
from maxbatch.update.state import abstract_model

_LARGEST_EXPONENT = 709.0  # of a float
# Keys of a run's training; here all devices share the model, unless the caller states otherwise.
_DEFAULTS = {
    "attention": "auto",
    "remat_policy": "none",
    "deduplicate": "false",  # of the records to score, not of those that the model was trained on
    "num_pipeline_microbatches": "-1",
    "num_pipeline_repeats": "1",
    **{axis_key(network, axis): "1" for network in ("ici", "dcn") for axis in AXES},
    "ici_fsdp_parallelism": "-1",
}


class RecordFault(ConfigError):
    """A record that cannot be scored; the message begins with its number, from 1."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"record {number}: {problem}")
        self.number, self.problem = number, problem


class RecordScore(NamedTuple):
    """The log-probabilities of one record."""

    tokens: np.ndarray  # int32[n]
    # float32[n - 1], in nats, of each token after the first given those before it
    logprobs: np.ndarray
    weights: np.ndarray  # float32[n - 1]; 0 for a token of a conversation that is not trained on
    loss: float | None  # nats per token; None without weight, or where it is not finite
    number: int = 0  # of the record among those given, from 1


class SkippedRecord(NamedTuple):
    """A bad record, or one that is equal to an earlier one, which has no score."""

    number: int  # among those given, from 1
    reason: str
    equal_to: int = 0  # the number of the earlier record; 0: the record is bad


class Scores(NamedTuple):
    """The scores of records, and their loss over all weights."""

    records: list[RecordScore]
    loss: float | None  # nats per token
    perplexity: float | None
    skipped: list[SkippedRecord]  # bad records, with skip_bad_records; equal ones, with deduplicate


class LoadedModel:
    """A model whose parameters are on this machine's devices; made by `load_model`.

    Attributes:
      config: the config of the model.
      params: its parameters.
      mesh: the mesh that holds them.
    """

    def __init__(self, path: str, overrides: Sequence[str] = (), averaged: bool = False) -> None:
        leave_out_absent_tpu()
        keys = {text.split("=", 1)[0].strip() for text in overrides}
        texts = [f"{key}={value}" for key, value in _DEFAULTS.items() if key not in keys] + list(
            overrides
        )
        self._path, self._source = path, open_source(path, averaged, stated_base(overrides))
        self.config: Config = self._source.config(texts)
        self._is_imported = is_huggingface_folder(path)
        self._scoring = (
            self.config if "dtype" in keys else self._source.config([*texts, "dtype=float32"])
        )
        self._has_stated_length = "max_target_length" in keys
        self._scorers: dict[int | None, Scorer] = {}  # by the most rows of a pass
        # A text begins as in the model's own training; an imported or fine-tuned model goes by its
        # tokenizer's rules.
        self._bos_by_key = "add_bos" in keys or not (
            self.config.recipe.has_answers or self._is_imported
        )

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of all devices."""
        return make_mesh(self.config)

    @cached_property
    def params(self) -> State:
        """The parameters, read at the first use."""
        config = self.config
        use_persistent_cache(
            config.compilation_cache_dir, cache_folder(config.data_cache_dir, "xla")
        )
        return restored(self._source, config.decoder, self.mesh)[1]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        tokenizer = tokenizer_of(self.config.stream)
        check_vocabulary(self.config, tokenizer.vocab_size)
        return tokenizer

    @cached_property
    def context(self) -> int:
        """The most tokens that the model reads at once: `max_target_length`, or more by an imported
        model's folder.
        """
        return (
            int(self.config.max_target_length)
            if self._has_stated_length
            else context_length(self.config.decoder, self.config.load_parameters_path)
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text, besides the tokenizer's own end."""
        return end_tokens(self.config.load_parameters_path)

    def scorer(self, most_rows: int | None = None) -> Scorer:
        """Returns a Scorer: the log-probability of each token given those before it.

        It computes in float32 unless the model was loaded with a `dtype`, and keeps its programs
        from one call to the next.

        Args:
          most_rows: rows in one pass; None: by their length.
        """
        if most_rows not in self._scorers:
            config = self._scoring
            scorer = Scorer(config.decoder, config.mesh, self.mesh, self.params, most_rows)
            self._scorers[most_rows] = scorer
        return self._scorers[most_rows]

    def completer(self, most_rows: int | None = None) -> Completer:
        """Returns a Completer for batches of prompts, in float32 unless the model was loaded with
        a `dtype`.

        Args:
          most_rows: rows in one pass; None: by their length.
        """
        config = self._scoring.decoder
        return Completer(self.params, self.tokenizer, config, self.mesh, self.context, most_rows)

    def first_ids(self) -> list[int]:
        """Returns the token that a text begins with, if one is put before it."""
        tokenizer = self.tokenizer
        begins = self.config.add_bos if self._bos_by_key else tokenizer.begins_with_bos()
        return [tokenizer.bos_id] if begins and tokenizer.bos_id is not None else []

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Returns a prompt and its continuation, as `maxbatch generate` prints them.

        Args:
          prompt: the text to continue; none: the beginning of a document.
          max_new_tokens: most tokens to add, at least 1.
          temperature: 0: the likeliest token; 1: as trained.
          top_k: draw from the K likeliest tokens; 0: from all.
          top_p: draw from the likeliest tokens that together have this probability, above 0 and at
            most 1.
          seed: the same seed gives the same text, in [0, 2^32).

        Raises:
          ConfigError: the tokenizer cannot be used.
          TrainingError: no token has a finite log-probability.
          ValueError: an argument is outside of its bounds.
        """
        for name, value, is_within, rule in (
            ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
            ("temperature", temperature, temperature >= 0, "at least 0"),
            ("top_k", top_k, top_k >= 0, "at least 0"),
            ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
            ("seed", seed, 0 <= seed < 2**32, "from 0 to 2^32 - 1"),
        ):
            if not is_within:
                raise ValueError(f"{name}={value}: must be {rule}")
        text_config = self.config.text
        if self._is_imported and not self._bos_by_key:
            text_config = text_config.replaced({"add_bos": self.tokenizer.begins_with_bos()})
        rules = SamplingRules(temperature, top_k, top_p, seed, max_new_tokens, self.end_ids)
        return generate_text(self.params, self.tokenizer, prompt, text_config, rules, self.mesh)

    def score(self, records: Sequence[str | Mapping[str, object]]) -> Scores:
        """Returns the log-probabilities of records, as `maxbatch score` prints them.

        They are computed in float32 unless the model was loaded with a `dtype`.

        Args:
          records: texts, or objects with `text`, `tokens` (ids), `messages`, or `prompt` and
            `completion`.

        Raises:
          RecordFault: a bad record: it has none of these fields, or one of them is of another type.
            With the key `skip_bad_records` such records have no score, and are in `skipped`; with
            `deduplicate` so are records of the same tokens and weights as an earlier one.
          TrainingError: no token has a finite log-probability.
        """
        numbers, encoded, skipped = (
            list[int](),
            list[tuple[np.ndarray, np.ndarray]](),
            list[SkippedRecord](),
        )
        seen: dict[bytes, int] = {}
        for number, record in enumerate(records, 1):
            try:
                tokens, weights = self._encoded(number, record)
            except RecordFault as fault:
                if not self.config.skip_bad_records:
                    raise
                skipped.append(SkippedRecord(number, fault.problem))
                continue
            if self.config.deduplicate:
                digest = record_digest(tokens.astype(np.int32).tobytes() + weights.tobytes())
                first = seen.setdefault(digest, number)
                if first != number:
                    skipped.append(SkippedRecord(number, f"equal to record {first}", first))
                    continue
            encoded.append((tokens, weights))
            numbers.append(number)
        if skipped and not encoded:
            raise RecordFault(skipped[0].number, skipped[0].reason)
        logprobs_by_record = [
            row.logprobs for row in self.scorer()([tokens for tokens, _ in encoded])
        ]
        if any(map(len, logprobs_by_record)) and not any(
            np.isfinite(logprobs).any() for logprobs in logprobs_by_record
        ):
            raise TrainingError(
                f"{self._path}: gives no token a finite log-probability; its parameters are not "
                "finite"
            )
        return _scores(numbers, encoded, logprobs_by_record, skipped)

    def _encoded(
        self, number: int, record: str | Mapping[str, object]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a record, and their weights."""
        try:
            return self._tokens_and_weights({"text": record} if isinstance(record, str) else record)
        except RecordError as error:
            raise RecordFault(number, str(error)) from error

    def _tokens_and_weights(self, record: Mapping[str, object]) -> tuple[np.ndarray, np.ndarray]:
        if "tokens" in record:
            tokens = self._ids(record["tokens"])
        elif "text" in record:
            tokens = self._text(record["text"])
        elif {"messages", "conversations", "prompt", "instruction"} & record.keys():
            documents = self._conversations.encode_batch([json.dumps(record).encode()])[0]
            if isinstance(documents, RecordError):
                raise documents
            [(ids, trained)] = documents
            return ids, trained.astype(np.float32)
        else:
            raise RecordError(
                "needs text, tokens, messages, or prompt and completion; its fields: "
                f"{shown_fields(record)}"
            )
        return tokens, np.ones(len(tokens), np.float32)

    def _ids(self, value: object) -> np.ndarray:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise RecordError("field tokens must be a list of whole numbers")
        last = self.config.vocab_size - 1
        beyond = next((token for token in value if not 0 <= token <= last), None)
        if beyond is not None:
            raise RecordError(
                f"token {beyond} is not an id of this model, whose ids are 0 to {last}"
            )
        return np.array(value, np.int32)

    def _text(self, value: object) -> np.ndarray:
        if not isinstance(value, str):
            raise RecordError(f"field text is {kind_of_value(value)}, not a text")
        return np.concatenate([np.array(self.first_ids(), np.int32), self.tokenizer.encode(value)])

    @cached_property
    def _conversations(self) -> Conversations:
        return Conversations(self.tokenizer, self.config.sft_train_on_completion_only)


def _scores(
    numbers: Sequence[int],
    encoded: Sequence[tuple[np.ndarray, np.ndarray]],
    logprobs_by_record: Sequence[np.ndarray],
    skipped: list[SkippedRecord],
) -> Scores:
    rows: list[RecordScore] = []
    total = weight = 0.0
    for number, (tokens, token_weights), logprobs in zip(
        numbers, encoded, logprobs_by_record, strict=True
    ):
        weights = token_weights[1:]
        nats, count = -float(np.sum(logprobs.astype(np.float64) * weights)), float(weights.sum())
        total, weight = total + nats, weight + count
        rows.append(
            RecordScore(tokens, logprobs, weights, finite(nats / count) if count else None, number)
        )
    loss = finite(total / weight) if weight else None
    perplexity = math.exp(loss) if loss is not None and loss < _LARGEST_EXPONENT else None
    return Scores(rows, loss, perplexity, skipped)


@overload
def load_model(
    path: str | os.PathLike[str], *, model: None = None, averaged: bool = False, **keys: object
) -> LoadedModel: ...


@overload
def load_model(
    path: str | os.PathLike[str], *, model: MakeModel, averaged: bool = False, **keys: object
) -> Any: ...


def load_model(
    path: str | os.PathLike[str],
    *,
    model: MakeModel | None = None,
    averaged: bool = False,
    **keys: object,
) -> LoadedModel | Any:
    """Loads a model onto the devices of this machine.

    Args:
      path: a run folder (its newest checkpoint), one of its checkpoints, a Hugging Face folder, or
        the name of a model of the Hugging Face hub.
      model: the user's own model that the run trained, as `train` was given it.
      averaged: whether to take the average of the parameters that the run keeps
        (`parameter_average_half_life`).
      keys: keys of the model's config over its own, such as `dtype="bfloat16"`.

    Returns:
      A `LoadedModel`; for a `model` of one's own that module, with the parameters of the
      checkpoint.

    Raises:
      ConfigError: there is no such model, it has no average, or it cannot be used.
    """
    if model is not None:
        return _own_module(path, model, averaged, override_texts(keys))
    loaded = LoadedModel(os.fspath(path), override_texts(keys), averaged)
    _ = loaded.params  # so that a fault is met here
    return loaded


def _own_module(
    path: str | os.PathLike[str], model: MakeModel, averaged: bool, overrides: Sequence[str]
) -> nnx.Module:
    leave_out_absent_tpu()
    source = open_checkpoint(os.fspath(path), averaged)
    if not source.is_own:
        raise ConfigError(
            f"model: {path} holds the config's own model; works: maxbatch.load_model({str(path)!r})"
        )
    check_parts(Parts(model=model))
    keys = {text.split("=", 1)[0].strip() for text in overrides}
    config = source.config_of_run(
        [*(f"{key}={value}" for key, value in _DEFAULTS.items() if key not in keys), *overrides]
    )
    graphdef, abstract = abstract_model(
        config.decoder, make_model=module_maker(partial(model, config), name_of(model))
    )
    params = placed(abstract, make_mesh(config))
    return nnx.merge(graphdef, source.open(config.model, params)(params))


def generate(model: LoadedModel | str | os.PathLike[str], prompt: str = "", **rules: Any) -> str:
    """Returns a prompt and its continuation by a model; see `LoadedModel.generate` for the rules of
    drawing.

    Args:
      model: a loaded model, or the path of one; load it once to use it often.
      prompt: the text to continue; none: the beginning of a document.
      rules: `max_new_tokens`, `temperature`, `top_k`, `top_p`, `seed`.
    """
    return _loaded(model).generate(prompt, **rules)


def score(
    model: LoadedModel | str | os.PathLike[str], records: Sequence[str | Mapping[str, object]]
) -> Scores:
    """Returns the log-probabilities that a model gives to records; see `LoadedModel.score`.

    Args:
      model: a loaded model, or the path of one; load it once to use it often.
      records: texts, or objects with `text`, `tokens` (ids), `messages`, or `prompt` and
        `completion`.
    """
    return _loaded(model).score(records)


def refuse_module(model: object) -> None:
    """Raises ConfigError for a user's own model, which has no cache and no tokenizer here."""
    if isinstance(model, nnx.Module):
        raise ConfigError(
            f"model: {code_name(model)} is a model of one's own, which has no cache and no "
            "tokenizer here; works: model(tokens, segments), which returns the logits"
        )


def _loaded(model: LoadedModel | str | os.PathLike[str]) -> LoadedModel:
    refuse_module(model)
    return model if isinstance(model, LoadedModel) else load_model(model)
