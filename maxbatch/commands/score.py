"""`maxbatch score`: the log-probabilities that a model gives to texts, tokens or conversations."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from maxbatch.commands.arguments import count, place
from maxbatch.config.huggingface import is_huggingface_folder
from maxbatch.config.rules import check_vocabulary
from maxbatch.config.sections import MeshConfig
from maxbatch.config.values import shown
from maxbatch.data.store.cache_folder import cache_folder
from maxbatch.data.store.conversations import Conversations, RecordError
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.files import list_files
from maxbatch.data.store.formats import FOLDER_FILES
from maxbatch.data.store.tokenizers import make_tokenizer
from maxbatch.plan.mesh_shape import AXES, axis_key
from maxbatch.system.errors import EXIT_DONE, ConfigError, TrainingError
from maxbatch.system.terminal import PipeConsole

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_LARGEST_EXPONENT = 709.0  # of a float
# Keys of a run's training; here all devices share the rows, unless the command states otherwise.
_DEFAULTS = {
    "dtype": "float32",
    "attention": "auto",
    "remat_policy": "none",
    "num_pipeline_microbatches": "-1",
    "num_pipeline_repeats": "1",
    **{axis_key(network, axis): "1" for network in ("ici", "dcn") for axis in AXES},
    "ici_fsdp_parallelism": "-1",
}


class Scored(NamedTuple):
    """One record: its tokens, and the weight of each."""

    tokens: np.ndarray  # int32[n]
    weights: np.ndarray  # float32[n]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `maxbatch score`."""
    model = "a run folder, one of its checkpoints, or a Hugging Face folder"
    parser.add_argument("model", type=place, metavar="MODEL", help=model)
    records = "jsonl: records with text, tokens (ids), messages, or prompt and completion"
    parser.add_argument("file", type=place, metavar="FILE", help=records)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the model's config, such as dtype")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    devices = "compute on N CPU devices made in this process"
    parser.add_argument("--simulate-devices", type=count, metavar="N", help=devices)


def run(args: argparse.Namespace) -> int:
    """Prints the log-probabilities of every record, or the loss of each; returns the exit code."""
    _check_overrides(args.overrides)
    lines = _lines(args.file)
    if args.simulate_devices:
        from maxbatch.commands.simulation import simulate_devices

        simulate_devices(args.simulate_devices)
    from maxbatch.model.decoder_config import DecoderConfig
    from maxbatch.parallel.mesh import make_mesh
    from maxbatch.training.compile.cache import use_persistent_cache
    from maxbatch.training.scoring import Scorer
    from maxbatch.training.weights.parameters import open_source, restored

    stated = {text.split("=", 1)[0].strip() for text in args.overrides}
    overrides = [f"{key}={value}" for key, value in _DEFAULTS.items() if key not in stated] + args.overrides
    source = open_source(args.model)
    config = source.config(overrides)
    # A text begins as in the model's own training; an imported or fine-tuned model goes by its tokenizer's rules.
    by_key = "add_bos" in stated or not (config.use_sft or is_huggingface_folder(args.model))
    records = _Encoder(config, by_key).records(lines, args.file)
    mesh = make_mesh(config)
    use_persistent_cache(config.compilation_cache_dir, cache_folder(config.data_cache_dir, "xla"))
    model = DecoderConfig.of(config)
    _, params = restored(source, model, mesh)
    found = Scorer(model, MeshConfig.of(config), mesh, params)([record.tokens for record in records])
    if any(map(len, found)) and not any(np.isfinite(logprobs).any() for logprobs in found):
        raise TrainingError(f"{args.model}: gives no token a finite log-probability; its parameters are not finite")
    scored = _figures(records, found)
    if args.json:
        print(json.dumps(scored))
    else:
        _print(scored)
    return EXIT_DONE


def _check_overrides(overrides: Sequence[str]) -> None:
    for text in overrides:
        if "=" not in text:
            raise ConfigError(f"{shown(text)}: an override is key=value; maxbatch score takes one MODEL and one FILE")


def _lines(path: str) -> list[dict[str, object]]:
    """Returns the records of a file.

    Raises:
      ConfigError: it cannot be read, or a line is no JSON object; or it has no record.
    """
    files = list_files("FILE", path, *FOLDER_FILES["jsonl"]).files
    source = DocumentSource("jsonl", "FILE", path, files, (), text_field=None, record_format="", skip_bad_records=False)
    lines = [json.loads(document.utf8) for document in source.documents()]
    if not lines:
        raise source.error("holds no record")
    return lines


class _Encoder:
    """A converter of records to tokens; its tokenizer is made for the first record that needs it.

    Args:
      config: of the model.
      bos_by_key: whether `add_bos` decides if a text begins with the beginning-of-text token; else its tokenizer does.
    """

    def __init__(self, config: ConfigDict, bos_by_key: bool) -> None:
        self._config, self._bos_by_key = config, bos_by_key

    def records(self, lines: Sequence[dict[str, object]], path: str) -> list[Scored]:
        """Returns the tokens of every record; raises ConfigError for one that has none, by its number from 1."""
        scored = []
        for number, line in enumerate(lines, 1):
            try:
                scored.append(self._record(line))
            except RecordError as error:
                raise ConfigError(f"FILE={shown(repr(path))}: record {number}: {error.problem}") from error
        return scored

    def _record(self, line: dict[str, object]) -> Scored:
        if "tokens" in line:
            tokens = self._ids(line["tokens"])
        elif "text" in line:
            tokens = self._text(line["text"])
        elif {"messages", "conversations", "prompt", "instruction"} & line.keys():
            found = self._conversations.encode_batch([json.dumps(line).encode()])[0]
            assert found is not None, "no record is left out"
            return Scored(found[0], found[1].astype(np.float32))
        else:
            fields = shown(", ".join(map(repr, list(line)[:8])) or "none")
            raise RecordError(0, f"needs text, tokens, messages, or prompt and completion; its fields: {fields}")
        return Scored(tokens, np.ones(len(tokens), np.float32))

    def _ids(self, value: object) -> np.ndarray:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise RecordError(0, "field tokens must be a list of whole numbers")
        last = self._config.vocab_size - 1
        beyond = next((token for token in value if not 0 <= token <= last), None)
        if beyond is not None:
            raise RecordError(0, f"token {beyond} is not an id of this model, whose ids are 0 to {last}")
        return np.array(value, np.int32)

    def _text(self, value: object) -> np.ndarray:
        if not isinstance(value, str):
            raise RecordError(0, f"field text is a {type(value).__name__}, not a text")
        tokenizer = self._conversations.tokenizer
        begins = self._config.add_bos if self._bos_by_key else tokenizer.begins_with_bos()
        bos = [tokenizer.bos_id] if begins and tokenizer.bos_id is not None else []
        return np.concatenate([np.array(bos, np.int32), tokenizer.encode(value)])

    @cached_property
    def _conversations(self) -> Conversations:
        tokenizer = make_tokenizer(self._config.tokenizer_type, self._config.tokenizer_path)
        check_vocabulary(self._config, tokenizer.vocab_size)
        return Conversations(tokenizer, self._config.sft_train_on_completion_only, skip_bad_records=False)


class _RecordFigures(TypedDict):
    logprobs: list[float | None]
    weights: list[float]
    loss: float | None


class _Figures(TypedDict):
    records: list[_RecordFigures]
    loss: float | None
    perplexity: float | None


def _figures(records: Sequence[Scored], found: Sequence[np.ndarray]) -> _Figures:
    """Returns the object of `--json`; a loss without weight, or one that is not finite, is null."""
    rows: list[_RecordFigures] = []
    total = weight = 0.0
    for record, logprobs in zip(records, found, strict=True):
        weights = record.weights[1:]
        nats, count = -float(np.sum(logprobs.astype(np.float64) * weights)), float(weights.sum())
        total, weight = total + nats, weight + count
        loss = _finite(nats / count) if count else None
        rows.append({"logprobs": [_finite(x) for x in logprobs.tolist()], "weights": weights.tolist(), "loss": loss})
    loss = _finite(total / weight) if weight else None
    perplexity = math.exp(loss) if loss is not None and loss < _LARGEST_EXPONENT else None
    return {"records": rows, "loss": loss, "perplexity": perplexity}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _print(scored: _Figures) -> None:
    console = PipeConsole(highlight=False, soft_wrap=True)
    tokens = 0.0
    for number, record in enumerate(scored["records"], 1):
        trained = sum(record["weights"])
        tokens += trained
        console.print(f"record {number}  tokens {trained:g}  loss {_number(record['loss'])}")
    records = len(scored["records"])
    names = f"{records:,} record{'' if records == 1 else 's'}  tokens {tokens:,.0f}"
    console.print(f"{names}  loss {_number(scored['loss'])}  perplexity {_number(scored['perplexity'])}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
