"""The rows that a config names: its dataset opened, split and cut into rows, and the settings that define them.

Does not import Grain, so that plans, which ask for the length of an epoch, need not wait for it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from maxbatch.config.keys import Fixes, names_fixing
from maxbatch.config.rules import check_data_paths
from maxbatch.config.values import exact
from maxbatch.data.store.heldout import HeldOutFraction
from maxbatch.data.store.lookup import find_store, open_store
from maxbatch.data.store.token_store import TokenStore
from maxbatch.data.store.tokenizers import Tokenizer, check_vocab_size, make_tokenizer
from maxbatch.data.stream.mixture import MixtureSource, read_mixture
from maxbatch.data.stream.packing import find_best_fit, open_best_fit
from maxbatch.data.stream.rows import ConcatenatePlan, DocumentPlan, RowPlan, RowSource, StoredRows
from maxbatch.data.stream.synthetic import SyntheticRows
from maxbatch.system.errors import ConfigError

Identity = dict[str, str | int | bool]


class SourceRows(NamedTuple):
    """Rows of one split of one source."""

    rows: RowSource
    identity: Identity  # the settings that define the rows, by config key if there is one
    tokenizer: Tokenizer

    @property
    def shuffle_name(self) -> str:
        """The name that keys the shuffle, with the seed: the hash of the content, however it is stored."""
        return str(self.identity.get("content", "synthetic"))


def open_rows(config: ConfigDict, *, held_out: bool) -> SourceRows | None:
    """Opens the training rows of a config, or the held-out ones (None if nothing is); new data are tokenised now."""
    check_data_paths(config)
    tokenizer = make_tokenizer(config)
    fraction = HeldOutFraction.from_config(config)
    if config.dataset_type == "synthetic":
        return _synthetic_rows(config, tokenizer, fraction, held_out)
    check_vocab_size(config, tokenizer)
    own_path = held_out and bool(config.eval_dataset_path)
    store = open_store(config, tokenizer, "eval_dataset_path" if own_path else "dataset_path")
    documents, rule = _split_documents(config, store, fraction, held_out)
    if held_out and rule == "none" and not own_path:
        return None
    # The content counts, and not how it was stored (dataset_type, paths, fields).
    identity: Identity = {
        "content": store.manifest["content"],
        "tokenizer": tokenizer.identity,
        **{key: config[key] for key in names_fixing(Fixes.TOKENS | Fixes.ROWS)},
        "held_out": rule,
    }
    plan: RowPlan
    if config.packing_strategy == "best_fit":
        key = _packing_key(store, rule, held_out)
        plan = open_best_fit(config, key, lambda: (store.offsets, documents))
    else:
        plan = _plan(config, store, documents)
    if not plan.num_rows:
        raise ConfigError(
            f"dataset_type={config.dataset_type}: the tokenizer gives no token for any of the {len(documents)} "
            "documents; works: add_eos=true"
        )
    return SourceRows(StoredRows(store, plan, len(documents), tokenizer.pad_id), identity, tokenizer)


def order_identity(config: ConfigDict) -> Identity:
    """Returns what fixes the order of a training stream: whether its rows are shuffled, and by what."""
    fixing = names_fixing(Fixes.ORDER) if config.enable_data_shuffling else ("enable_data_shuffling",)
    return {key: config[key] for key in fixing}


def samples_per_epoch_if_cached(config: ConfigDict) -> int | None:
    """Returns the samples of an epoch if they are known without reading data, else None (a mixture has no epochs).

    Raises:
      ConfigError: `num_epochs` of a mixture.
    """
    try:
        mixture = read_mixture(config)
        if mixture is None:
            return _num_rows_if_cached(config)
    except ConfigError:
        # Planning for data that are not on this machine leaves out epoch figures; training on them raises.
        return None
    refuse_num_epochs(config, mixture)
    return None


def refuse_num_epochs(config: ConfigDict, mixture: tuple[MixtureSource, ...]) -> None:
    """Raises ConfigError for `num_epochs` of a mixture, with the number of samples that it might mean, if known."""
    if config.num_epochs is None:
        return
    try:
        rows = [_num_rows_if_cached(source.config) for source in mixture]
    except ConfigError:
        rows = [None]
    samples = 10**6 if None in rows else math.ceil(exact(config.num_epochs) * sum(filter(None, rows)))
    raise ConfigError(
        f"num_epochs={config.num_epochs}: num_epochs of a mixture is not defined, since each of its sources has its "
        f"own epochs; works: train_samples={samples}"
    )


def _num_rows_if_cached(config: ConfigDict) -> int | None:
    """Returns the training rows of one source."""
    check_data_paths(config)
    fraction = HeldOutFraction.from_config(config)
    if config.dataset_type == "synthetic":
        return fraction.count(config.synthetic_samples, held_out=False)
    tokenizer = make_tokenizer(config)
    store = find_store(config, tokenizer)
    if store is None:
        return None
    documents, rule = _split_documents(config, store, fraction, held_out=False)
    if config.packing_strategy == "best_fit":
        plan = find_best_fit(config, _packing_key(store, rule, held_out=False))
        return None if plan is None else plan.num_rows
    return _plan(config, store, documents).num_rows


def _packing_key(store: TokenStore, rule: str, held_out: bool) -> dict[str, Any]:
    """Returns the values that fix the lengths of a split's documents, and so their packing into rows."""
    manifest = store.manifest
    return {
        **{name: manifest[name] for name in ("content", "tokenizer", "documents", "tokens")},
        "rule": rule,
        "held_out": manifest["held_out"] if rule == "list" else None,
        "split": held_out,
    }


def _plan(config: ConfigDict, store: TokenStore, documents: np.ndarray) -> ConcatenatePlan | DocumentPlan:
    plan = ConcatenatePlan if config.packing else DocumentPlan
    return plan(store.offsets, documents, config.max_target_length)


def _synthetic_rows(
    config: ConfigDict, tokenizer: Tokenizer, fraction: HeldOutFraction, held_out: bool
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
    config: ConfigDict, store: TokenStore, fraction: HeldOutFraction, held_out: bool
) -> tuple[np.ndarray, str]:
    """Returns the documents of a split and the rule that chose them."""
    total = store.manifest["documents"]
    if fraction.fraction:
        fraction.refuse_empty(total, "documents")
        return fraction.records(fraction.count(total, held_out), held_out), fraction.rule
    listed = np.zeros(total, bool)
    listed[store.manifest["held_out"]] = True
    if not listed.any():
        return np.arange(total), "none"
    documents = np.flatnonzero(listed if held_out else ~listed)
    if not len(documents):
        raise ConfigError(
            f"dataset_type={config.dataset_type!r}: all {total} documents are held out, and none is left to train on"
        )
    return documents, "list"
