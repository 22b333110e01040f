"""The rows of documents: joined and cut, packed whole, or one document a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from maxbatch.config.combined import StreamConfig
from maxbatch.config.sections import STORES
from maxbatch.data.store.document_table import RangedTable
from maxbatch.data.store.heldout import Records
from maxbatch.data.stream.packing import find_best_fit, open_best_fit
from maxbatch.data.stream.rows import (
    BlockLayout,
    ConcatenatePlan,
    DocumentPlan,
    Lay,
    RowPlan,
    StoredRows,
    WholeLayout,
)
from maxbatch.data.stream.split import Fitted, Split, SplitRows
from maxbatch.system.errors import ConfigError

_WHOLE_DOCUMENTS = 1 << 18  # whose places are held in memory: 24 bytes each


class Cut(NamedTuple):
    """How a kind of sample cuts the documents of a split."""

    strategy: str  # `packing_strategy`
    reads_blocks: bool  # whether rows can be found through blocks of a large document table
    fitted: Callable[[], Fitted]  # the documents, cut to fit rows


def open_documents(config: StreamConfig, split: Split, cut: Cut) -> SplitRows:
    """Returns the rows of a split's documents.

    Raises:
      ConfigError: the documents have no tokens, or one is too long for its kind of sample.
    """
    plan, num_documents, num_overlong = _open_plan(config, split, cut)
    if not plan.num_rows:
        problem = (
            f"dataset_type={config.dataset_type}: none of the {len(split.records)} documents has "
            "a token"
        )
        adds_tokens = config.dataset_type not in STORES
        raise ConfigError(
            f"{problem} of the tokenizer; works: add_eos=true" if adds_tokens else problem
        )
    return SplitRows(StoredRows(split.store, plan, num_documents, split.pad_id), num_overlong)


def num_rows_if_cached(config: StreamConfig, split: Split, cut: Cut) -> int | None:
    """Returns the number of rows, or None if documents would have to be packed."""
    if cut.strategy == "best_fit":
        packing = find_best_fit(config.data_cache_dir, config.max_target_length, split.key)
        return None if packing is None else packing.num_rows
    return _open_plan(config, split, cut)[0].num_rows


def _open_plan(config: StreamConfig, split: Split, cut: Cut) -> tuple[RowPlan, int, int]:
    """Returns the cut of a split into rows, the number of its documents, and the number longer than
    a row.
    """
    records, length = split.records, config.max_target_length
    if isinstance(records, Records) and cut.strategy == "concatenate":
        if records.are_all and config.packing:  # the store's tokens in order, without computation
            return ConcatenatePlan.of_store(split.store, length), len(records), 0
        is_large = records.total > _WHOLE_DOCUMENTS or isinstance(split.store.table, RangedTable)
        if cut.reads_blocks and is_large:
            return _plan(config, partial(BlockLayout, split.store, records)), len(records), 0
    extents, num_overlong = cut.fitted()
    plan: RowPlan
    if cut.strategy == "best_fit":
        plan = open_best_fit(config.data_cache_dir, length, split.key, lambda: extents)
    else:
        plan = _plan(config, partial(WholeLayout, extents))
    return plan, len(extents.start_S), num_overlong


def _plan(config: StreamConfig, lay: Lay) -> ConcatenatePlan | DocumentPlan:
    plan = ConcatenatePlan if config.packing else DocumentPlan
    return plan(lay, config.max_target_length)
