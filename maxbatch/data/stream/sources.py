"""The rows that a config names: its dataset opened, split and cut into rows, and the settings that define them.

Does not import Grain, so that plans, which need the length of an epoch, do not wait for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np

from maxbatch.config.keys import Fixes
from maxbatch.config.paths import is_mixture_file
from maxbatch.config.rules import check_data_paths, check_vocabulary
from maxbatch.config.sections import DataConfig, names_fixing
from maxbatch.config.values import exact
from maxbatch.data.store.document_table import RangedTable
from maxbatch.data.store.heldout import HeldOutFraction, Records
from maxbatch.data.store.lookup import find_store, open_store
from maxbatch.data.store.token_store import TokenStore
from maxbatch.data.store.tokenizers import Tokenizer, make_tokenizer
from maxbatch.data.stream.conversation_rows import count_trained_tokens, find_trained_tokens, fit_rows
from maxbatch.data.stream.epoch_lengths import remember_length
from maxbatch.data.stream.mixture import MixtureSource, read_mixture
from maxbatch.data.stream.packing import find_best_fit, open_best_fit
from maxbatch.data.stream.pair_rows import PairRows
from maxbatch.data.stream.rows import (
    BlockLayout,
    ConcatenatePlan,
    DocumentPlan,
    Extents,
    Lay,
    RowPlan,
    RowSource,
    StoredRows,
    WholeLayout,
)
from maxbatch.data.stream.stream_config import StreamConfig
from maxbatch.data.stream.synthetic import SyntheticRows
from maxbatch.data.stream.trained_tokens import ConversationFigures, TrainedShare, TrainedTokens
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import AnyPath

Identity = dict[str, str | int | bool]
Documents = np.ndarray | Records  # their numbers in the store


class SourceRows(NamedTuple):
    """Rows of one split of one source."""

    rows: RowSource
    identity: Identity  # the settings that define the rows, by config key if there is one
    tokenizer: Tokenizer
    store_folder: AnyPath | None = None  # None: the rows are computed

    @property
    def shuffle_name(self) -> str:
        """The name that keys the shuffle, with the seed: the hash of the content, however it is stored."""
        return str(self.identity.get("content", "synthetic"))


def open_rows(config: StreamConfig, *, held_out: bool) -> SourceRows | None:
    """Opens the training rows of a config, or the held-out ones (None if nothing is); new data are tokenised now."""
    check_data_paths(config)
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    fraction = HeldOutFraction.of(config.eval_fraction)
    if config.dataset_type == "synthetic":
        return _synthetic_rows(config, tokenizer, fraction, held_out)
    check_vocabulary(config, tokenizer.vocab_size)
    own_path = held_out and bool(config.eval_dataset_path)
    store = open_store(config, tokenizer, "eval_dataset_path" if own_path else "dataset_path")
    documents, rule = _split_documents(config, store, fraction, held_out)
    if held_out and rule == "none" and not own_path:
        return None
    # Only the content counts, not how it was stored (dataset_type, paths, fields).
    identity: Identity = {
        "content": store.manifest["content"],
        "tokenizer": tokenizer.identity,
        **_row_identity(config),
        "held_out": rule,
    }
    key = _packing_key(config, store, rule, held_out)
    if config.use_dpo:
        pairs = _pair_rows(config, store, documents, tokenizer.pad_id)
        pairs.conversations = ConversationFigures(pairs.num_overlong, count_trained_tokens(config, key, pairs))
        return SourceRows(pairs, identity, tokenizer, store.folder)
    plan, num_documents, num_overlong = _open_plan(config, store, documents, key)
    if not plan.num_rows:
        raise ConfigError(
            f"dataset_type={config.dataset_type}: the tokenizer gives no token for any of the {len(documents)} "
            "documents; works: add_eos=true"
        )
    rows = StoredRows(store, plan, num_documents, tokenizer.pad_id)
    if config.use_sft:
        rows.conversations = ConversationFigures(num_overlong, count_trained_tokens(config, key, rows))
    if not held_out:
        remember_length(config, plan.num_rows)
    return SourceRows(rows, identity, tokenizer, store.folder)


def _pair_rows(config: StreamConfig, store: TokenStore, documents: Documents, pad_id: int) -> PairRows:
    numbers_S = documents.between(0, documents.total) if isinstance(documents, Records) else documents
    return PairRows(store, numbers_S, config.max_target_length, config.overlong, pad_id)


def _row_identity(config: StreamConfig) -> Identity:
    """Returns the values that fix the rows of given documents; the template alone fixes a conversation's tokens."""
    if config.use_dpo:
        return {key: config[key] for key in ("use_dpo", "max_target_length", "overlong", "skip_bad_records")}
    if not config.use_sft:
        return {key: config[key] for key in names_fixing(Fixes.TOKENS | Fixes.ROWS)}
    identity = {key: config[key] for key in names_fixing(Fixes.ROWS | Fixes.CHAT)}
    if identity["sft_format"] == "auto":  # what was found is in the content; streams from before the key had no other
        del identity["sft_format"]
    return identity | {"packing_strategy": _strategy(config)}


def _strategy(config: StreamConfig) -> str:
    """Returns how documents are packed: conversations are never cut, so best fit is the only way."""
    return "best_fit" if config.use_sft and config.packing else str(config.packing_strategy)


def _open_plan(
    config: StreamConfig, store: TokenStore, documents: Documents, key: Mapping[str, object]
) -> tuple[RowPlan, int, int]:
    """Returns the cut of a split into rows, its documents, and how many of them were longer than a row."""
    if _is_as_stored(config, documents):
        return ConcatenatePlan.of_store(store, config.max_target_length), len(documents), 0
    if _is_read_in_blocks(config, store) and isinstance(documents, Records):
        return _plan(config, partial(BlockLayout, store, documents)), len(documents), 0
    extents, num_overlong = _extents(config, store, documents)
    plan: RowPlan
    if _strategy(config) == "best_fit":
        plan = open_best_fit(config.data_cache_dir, config.max_target_length, key, lambda: extents)
    else:
        plan = _plan(config, partial(WholeLayout, extents))
    return plan, len(extents.start_S), num_overlong


def _is_as_stored(config: StreamConfig, documents: Documents) -> bool:
    """Returns whether rows are the tokens of a store in its order, cut every L tokens: then nothing is computed."""
    is_whole = isinstance(documents, Records) and documents.are_all
    return is_whole and bool(config.packing) and _strategy(config) == "concatenate"


def _is_read_in_blocks(config: StreamConfig, store: TokenStore) -> bool:
    """Returns whether rows are looked up in blocks of a large table; best fit needs all lengths at once."""
    return not config.use_sft and _strategy(config) == "concatenate" and isinstance(store.table, RangedTable)


def _extents(config: StreamConfig, store: TokenStore, documents: Documents) -> tuple[Extents, int]:
    """Returns the documents of a split as they go into rows, and how many were longer than a row."""
    documents_S = documents.between(0, documents.total) if isinstance(documents, Records) else documents
    if config.use_sft:
        return fit_rows(store, documents_S, config.max_target_length, config.overlong)
    return Extents.of(store.offsets, documents_S), 0


def order_identity(config: DataConfig) -> Identity:
    """Returns the values that fix the order of a training stream: whether its rows are shuffled, and by what key."""
    fixing = names_fixing(Fixes.ORDER) if config.enable_data_shuffling else ("enable_data_shuffling",)
    return {key: config[key] for key in fixing}


def samples_per_epoch_if_cached(config: StreamConfig) -> int | None:
    """Returns the samples of an epoch if they are known without reading data, else None (a mixture has no epochs).

    Raises:
      ConfigError: `num_epochs` of a mixture, or a mixture that breaks a rule.
    """
    if is_mixture_file(config.dataset_path) and not os.path.exists(os.path.expanduser(config.dataset_path)):
        return None
    mixture = read_mixture(config)
    try:
        if mixture is None:
            found = _find_rows(config)
            return found and found.num_rows
    except ConfigError:
        # Planning for data that are not on this machine leaves out epoch figures; training on them raises.
        return None
    refuse_num_epochs(config.num_epochs, mixture)
    return None


def refuse_num_epochs(num_epochs: int | float | Fraction | None, mixture: tuple[MixtureSource, ...]) -> None:
    """Raises ConfigError for `num_epochs` of a mixture, with the number of samples that it might mean, if known."""
    if num_epochs is None:
        return
    try:
        found = [_find_rows(source.config) for source in mixture]
        rows = [one and one.num_rows for one in found]
    except ConfigError:
        rows = [None]
    samples = 10**6 if None in rows else math.ceil(exact(num_epochs) * sum(filter(None, rows)))
    raise ConfigError(
        f"num_epochs={num_epochs}: num_epochs of a mixture is not defined, since each of its sources has its "
        f"own epochs; works: train_samples={samples} num_epochs=null"
    )


def trained_tokens_if_cached(config: StreamConfig) -> list[TrainedShare] | None:
    """Returns the trained tokens of each source of conversations if they are known without reading data, else None."""
    if not config.marks_trained:
        return None
    try:
        mixture = read_mixture(config) or (MixtureSource("", Fraction(1), config),)
        found = [(source.weight, _find_rows(source.config)) for source in mixture]
    except ConfigError:
        return None
    shares = [TrainedShare(float(weight), rows.trained) for weight, rows in found if rows and rows.trained]
    return shares if len(shares) == len(mixture) else None


class _FoundRows(NamedTuple):
    """The facts about a split's rows that are known without reading data."""

    num_rows: int
    trained: TrainedTokens | None = None  # of conversations


def _find_rows(config: StreamConfig) -> _FoundRows | None:
    """Returns the training rows of one source, if they are known without reading data."""
    check_data_paths(config)
    fraction = HeldOutFraction.of(config.eval_fraction)
    if config.dataset_type == "synthetic":
        return _FoundRows(fraction.count(config.synthetic_samples, held_out=False))
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    store = find_store(config, tokenizer)
    if store is None:
        return None
    documents, rule = _split_documents(config, store, fraction, held_out=False)
    key = _packing_key(config, store, rule, held_out=False)
    trained = find_trained_tokens(config, key) if config.marks_trained else None
    if config.use_dpo:
        return _FoundRows(_pair_rows(config, store, documents, tokenizer.pad_id).num_rows, trained)
    if _strategy(config) == "best_fit":
        plan = find_best_fit(config.data_cache_dir, config.max_target_length, key)
        return None if plan is None else _FoundRows(plan.num_rows, trained)
    return _FoundRows(_open_plan(config, store, documents, key)[0].num_rows, trained)


def _packing_key(config: StreamConfig, store: TokenStore, rule: str, held_out: bool) -> dict[str, object]:
    """Returns the values that fix the lengths of a split's documents, and so their packing into rows."""
    manifest = store.manifest
    overlong = {"overlong": config.overlong} if config.marks_trained else {}
    return {
        **overlong,
        **{name: manifest[name] for name in ("content", "tokenizer", "documents", "tokens")},
        "rule": rule,
        "held_out": manifest["held_out"] if rule == "list" else None,
        "split": held_out,
    }


def _plan(config: StreamConfig, lay: Lay) -> ConcatenatePlan | DocumentPlan:
    plan = ConcatenatePlan if config.packing else DocumentPlan
    return plan(lay, config.max_target_length)


def _synthetic_rows(
    config: StreamConfig, tokenizer: Tokenizer, fraction: HeldOutFraction, held_out: bool
) -> SourceRows | None:
    samples, seed = config.synthetic_samples, config.data_shuffle_seed
    fraction.refuse_empty(samples, "samples")
    if held_out and not fraction.fraction:
        return None
    # A model may have a vocabulary too small for bytes; the rows then use only its tokens.
    token_range = min(config.vocab_size, tokenizer.vocab_size, 256)
    rows = SyntheticRows(samples, config.max_target_length, seed, token_range, fraction, held_out)
    stated = ("dataset_type", "synthetic_samples", "data_shuffle_seed", "max_target_length")
    identity = {key: config[key] for key in stated} | {"token_range": token_range, "held_out": fraction.rule}
    return SourceRows(rows, identity, tokenizer)


def _split_documents(
    config: StreamConfig, store: TokenStore, fraction: HeldOutFraction, held_out: bool
) -> tuple[Documents, str]:
    """Returns the documents of a split (the pairs, with `use_dpo`), and the rule that chose them."""
    total = store.manifest["documents"] // (2 if config.use_dpo else 1)  # a pair is two of them
    if fraction.fraction:
        fraction.refuse_empty(total, "pairs" if config.use_dpo else "documents")
        return Records(fraction, total, held_out), fraction.rule
    if not store.manifest["held_out"]:
        return Records(fraction, total, held_out=False), "none"
    listed = np.zeros(total, bool)
    listed[store.manifest["held_out"]] = True
    documents = np.flatnonzero(listed if held_out else ~listed)
    if not len(documents):
        raise ConfigError(
            f"dataset_type={config.dataset_type!r}: all {total} documents are held out, and none is left to train on"
        )
    return documents, "list"
