"""The rows of a config: its dataset opened, split and cut into rows, and the settings that define
them.

Does not import Grain, so that plans need not wait for it to get the length of an epoch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from maxbatch.config.combined import StreamConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.paths import is_mixture_file
from maxbatch.config.rules import check_data_paths, check_vocabulary
from maxbatch.config.sections import STORES, names_fixing
from maxbatch.config.values import exact
from maxbatch.data.store.heldout import HeldOutFraction, Records
from maxbatch.data.store.lookup import find_store, open_store
from maxbatch.data.store.megatron import MegatronStore
from maxbatch.data.store.skipped import skipped_text
from maxbatch.data.store.store import WHOLE_CONTENT, Store
from maxbatch.data.stream.bad_records import place_of_kept
from maxbatch.data.stream.epoch_lengths import remember_length
from maxbatch.data.stream.mixture import MixtureSource, read_mixture
from maxbatch.data.stream.overlong import OverlongError
from maxbatch.data.stream.recipe import Identity, StreamRecipe
from maxbatch.data.stream.rows import RowSource
from maxbatch.data.stream.split import Split
from maxbatch.data.stream.synthetic import SyntheticRows
from maxbatch.data.stream.trained_counts import count_trained_tokens, find_trained_tokens
from maxbatch.data.stream.trained_tokens import TrainedFigures, TrainedShare, TrainedTokens
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import tokenizer_of
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath
from maxbatch.system.terminal.folding import counted

Documents = np.ndarray | Records  # their numbers in the store


class SourceRows(NamedTuple):
    """Rows of one split of one source."""

    rows: RowSource
    identity: Identity  # the settings that define the rows, by config key if there is one
    tokenizer: Tokenizer
    store_folder: AnyPath | None = None  # None: the rows are computed
    notes: tuple[str, ...] = ()  # records left out, cut or split, and why

    @property
    def shuffle_name(self) -> str:
        """The name that, with the seed, keys the shuffle: the hash of the content, independent of
        storage.
        """
        return str(self.identity.get("content", "synthetic"))


def open_rows(
    config: StreamConfig, *, held_out: bool, whole: StreamConfig | None = None
) -> SourceRows | None:
    """Opens the training or held-out rows of a config (None without held-out data); tokenises new
    data.

    `whole` is the config of the mixture of which this dataset is a source.
    """
    check_data_paths(config)
    tokenizer = tokenizer_of(config)
    fraction = HeldOutFraction.of(config.eval_fraction)
    if config.dataset_type == "synthetic":
        return _synthetic_rows(config, tokenizer, fraction, held_out)
    check_vocabulary(config, tokenizer.vocab_size)
    own_path = held_out and bool(config.eval_dataset_path)
    store = open_store(
        config, tokenizer, "eval_dataset_path" if own_path else "dataset_path", whole
    )
    if isinstance(store, MegatronStore):
        store = store.of_vocabulary(config.vocab_size)
    documents, rule = _split_documents(config, store, fraction, held_out)
    if held_out and rule == "none" and not own_path:
        return None
    recipe = StreamRecipe.of(config.recipe)
    # Only the content counts, not how it was stored (dataset_type, paths, fields).
    identity: Identity = {
        "content": store.manifest["content"],
        "tokenizer": store.manifest["tokenizer"],
        **_row_identity(config, store),
        "held_out": rule,
    }
    if "whole_content" in store.manifest:
        identity[WHOLE_CONTENT] = store.manifest["whole_content"]
    if store.manifest.get("deduplicated"):
        identity["deduplicate"] = True
    key = _packing_key(config, store, rule, held_out)
    try:
        rows, num_overlong = recipe.rows(config, Split(store, documents, key, tokenizer))
    except OverlongError as error:
        path_key = "eval_dataset_path" if own_path else "dataset_path"
        place = place_of_kept(config, path_key, tokenizer, error.number, whole)
        raise error.at(place) if place else error from None
    if recipe.has_answers:
        rows.trained = TrainedFigures(num_overlong, count_trained_tokens(config, key, rows))
    if not held_out:
        remember_length(config, rows.num_rows)
    return SourceRows(
        rows, identity, tokenizer, store.folder, tuple(_notes(config, store, rows, num_overlong))
    )


def _notes(config: StreamConfig, store: Store, rows: RowSource, num_overlong: int) -> Iterator[str]:
    """Yields how many records were left out, cut or split, and why."""
    listed = "" if config.dataset_type in STORES else "; maxbatch data --bad lists them"
    if skipped := rows.skipped_records:
        yield f"{skipped_text(skipped, store.manifest.get('skipped_reasons', {}))}{listed}"
    length = config.max_target_length
    if num_overlong:
        effect = (
            f"cut to max_target_length={length}" if config.overlong == "truncate" else "left out"
        )
        yield (
            f"{counted(num_overlong, 'record')} of more than {length} tokens {effect} "
            f"(overlong={config.overlong}){listed}"
        )
    if not config.recipe.has_answers and not config.packing and rows.num_rows > rows.num_documents:
        yield (
            f"{rows.num_documents:,} documents make {rows.num_rows:,} rows: those of more than "
            f"{length} tokens are split{listed}"
        )


def _row_identity(config: StreamConfig, store: Store) -> Identity:
    """Returns the settings that fix the rows; a store of another program has the special tokens
    that it has.
    """
    identity = StreamRecipe.of(config.recipe).row_identity(config)
    adds_tokens = not isinstance(store, MegatronStore)
    return {
        key: value
        for key, value in identity.items()
        if adds_tokens or key not in names_fixing(Fixes.TOKENS)
    }


def samples_per_epoch_if_cached(config: StreamConfig) -> int | None:
    """Returns the samples of an epoch if known without reading data, else None (a mixture has no
    epochs).

    Raises:
      ConfigError: `num_epochs` of a mixture, or an invalid mixture.
    """
    if is_mixture_file(config.dataset_path, config.dataset_type) and not os.path.exists(
        os.path.expanduser(config.dataset_path)
    ):
        return None
    mixture = read_mixture(config)
    try:
        if mixture is None:
            rows = _find_rows(config)
            return rows and rows.num_rows
    except ConfigError:
        # Planning for data that are not on this machine leaves out epoch figures; training on them
        # raises.
        return None
    refuse_num_epochs(config, mixture)
    return None


def refuse_num_epochs(config: StreamConfig, mixture: tuple[MixtureSource, ...]) -> None:
    """Raises ConfigError for `num_epochs` of a mixture, with a likely number of samples, if
    known.
    """
    num_epochs = config.num_epochs
    if num_epochs is None:
        return
    try:
        cached = [_find_rows(source.config, config) for source in mixture]
        rows = [figures and figures.num_rows for figures in cached]
    except ConfigError:
        rows = [None]
    samples = 10**6 if None in rows else math.ceil(exact(num_epochs) * sum(filter(None, rows)))
    raise ConfigError(
        f"num_epochs={num_epochs}: num_epochs of a mixture is not defined, since each of its "
        f"sources has its own epochs; works: train_samples={samples} num_epochs=null"
    )


def trained_tokens_if_cached(config: StreamConfig) -> list[TrainedShare] | None:
    """Returns the trained tokens of each source if known without reading data,
    else None.
    """
    if not config.recipe.has_answers:
        return None
    try:
        mixture = read_mixture(config) or (MixtureSource("", Fraction(1), config),)
        weighted = [(source.weight, _find_rows(source.config, config)) for source in mixture]
    except ConfigError:
        return None
    shares = [
        TrainedShare(float(weight), rows.trained)
        for weight, rows in weighted
        if rows and rows.trained
    ]
    return shares if len(shares) == len(mixture) else None


def lengths_if_cached(config: StreamConfig, count: int) -> np.ndarray | None:
    """Returns the tokens of about `count` samples, spread over the data of each source by its
    weight, in a random order; None if data would have to be read.
    """
    lengths: list[np.ndarray] = []
    try:
        mixture = read_mixture(config) or (MixtureSource("", Fraction(1), config),)
        for source in mixture:
            found = _find_rows(source.config, config if source.name else None)
            # opening rows with answers counts their trained tokens, which reads the data
            if not found or (config.recipe.has_answers and not found.trained):
                return None
            opened = open_rows(source.config, held_out=False)
            assert opened is not None, "training rows are there"
            share = max(1, round(count * source.weight))
            rows_n = np.linspace(0, opened.rows.num_rows - 1, share).astype(np.int64)
            lengths.append(opened.rows.lengths(rows_n.tolist()))
    except ConfigError:
        return None
    return np.random.default_rng(0).permutation(np.concatenate(lengths))


class _FoundRows(NamedTuple):
    """Facts about a split's rows, known without reading data."""

    num_rows: int
    trained: TrainedTokens | None = None  # if not all are


def _find_rows(config: StreamConfig, whole: StreamConfig | None = None) -> _FoundRows | None:
    """Returns facts about one source's training rows, if known without reading data."""
    check_data_paths(config)
    fraction = HeldOutFraction.of(config.eval_fraction)
    if config.dataset_type == "synthetic":
        return _FoundRows(fraction.count(config.synthetic_samples, held_out=False))
    tokenizer = tokenizer_of(config)
    store = find_store(config, tokenizer, whole=whole)
    if store is None:
        return None
    documents, rule = _split_documents(config, store, fraction, held_out=False)
    key = _packing_key(config, store, rule, held_out=False)
    recipe = StreamRecipe.of(config.recipe)
    num_rows = recipe.num_rows_if_cached(config, Split(store, documents, key, tokenizer))
    if num_rows is None:
        return None
    return _FoundRows(num_rows, find_trained_tokens(config, key) if recipe.has_answers else None)


def _packing_key(
    config: StreamConfig, store: Store, rule: str, held_out: bool
) -> dict[str, object]:
    """Returns the values that fix the lengths of a split's documents, and so their packing into
    rows.
    """
    manifest = store.manifest
    overlong = {"overlong": config.overlong} if config.recipe.has_answers else {}
    return {
        **overlong,
        **{name: manifest[name] for name in ("content", "tokenizer", "documents", "tokens")},
        "rule": rule,
        "held_out": manifest["held_out"] if rule == "list" else None,
        "split": held_out,
    }


def _synthetic_rows(
    config: StreamConfig, tokenizer: Tokenizer, fraction: HeldOutFraction, held_out: bool
) -> SourceRows | None:
    samples, seed = config.synthetic_samples, config.data_shuffle_seed
    fraction.refuse_empty(samples, "samples")
    if held_out and not fraction.fraction:
        return None
    # A vocabulary may be too small for bytes; rows then use only its tokens.
    token_range = min(config.vocab_size, tokenizer.vocab_size, 256)
    rows = SyntheticRows(samples, config.max_target_length, seed, token_range, fraction, held_out)
    keys = ("dataset_type", "synthetic_samples", "data_shuffle_seed", "max_target_length")
    identity = {key: config[key] for key in keys} | {
        "token_range": token_range,
        "held_out": fraction.rule,
    }
    return SourceRows(rows, identity, tokenizer)


def _split_documents(
    config: StreamConfig, store: Store, fraction: HeldOutFraction, held_out: bool
) -> tuple[Documents, str]:
    """Returns the records of a split, and its rule."""
    recipe = StreamRecipe.of(config.recipe)
    total = store.manifest["documents"] // recipe.documents_per_record
    if fraction.fraction:
        fraction.refuse_empty(total, recipe.store_records)
        return Records(fraction, total, held_out), fraction.rule
    if not store.manifest["held_out"]:
        return Records(fraction, total, held_out=False), "none"
    listed = np.zeros(total, bool)
    listed[store.manifest["held_out"]] = True
    documents = np.flatnonzero(listed if held_out else ~listed)
    if not len(documents):
        raise ConfigError(
            f"dataset_type={config.dataset_type!r}: all {total} documents are held out, and none "
            "is left to train on"
        )
    return documents, "list"
