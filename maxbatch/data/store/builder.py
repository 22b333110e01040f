"""The builder of token stores.

A build is atomic, runs once if several processes want the store, and gives the same bytes for any
number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maxbatch.config.combined import StoreConfig
from maxbatch.data.store.blocks import BLOCKS
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.duplicates import SeenRecords
from maxbatch.data.store.formats import CUTTING
from maxbatch.data.store.growing import GrowingHashes, GrowingTable
from maxbatch.data.store.recipe import StoreRecipe
from maxbatch.data.store.record_places import RECORDS, GrowingPlaces
from maxbatch.data.store.shards import KeepShard, RemoteShards, Shard, ShardWriter
from maxbatch.data.store.skipped import reasons_text
from maxbatch.data.store.store import Manifest
from maxbatch.data.store.token_store import (
    MANIFEST,
    OFFSETS,
    VERSION,
    TokenLayout,
    TokenStore,
    manifest_checksum,
    new_content_hash,
    open_folder,
    shard_names,
    signature,
    store_files,
)
from maxbatch.data.store.tokenise import Tokenised, Tokeniser, tokenise_all
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.atomic_files import (
    remove_leftovers,
    write_atomically,
    writing_atomically,
)
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.leases import leased
from maxbatch.system.storage.locks import exclusive
from maxbatch.system.storage.storage import AnyPath, is_remote, upload

if TYPE_CHECKING:
    from maxbatch.system.processes.ray_cluster import RayCluster

# Below this size, starting worker processes takes longer than the work.
_WORTH_WORKERS_BYTES = 32 << 20
# Approximate tokens per file in an object store; ten trillion tokens are thousands of objects.
SHARD_TOKENS = 1 << 30

Progress = Callable[[int], None]  # called with the bytes tokenised since the last call


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(source: DocumentSource) -> int:
    """Returns the number of processes that tokenise a dataset: one per core, or 1 if it is
    small.
    """
    return num_cores() if source.size >= _WORTH_WORKERS_BYTES else 1


@dataclass(frozen=True)
class Build:
    """The dataset to build, and how to build it.

    Attributes:
      workers: most processes that tokenise, or most tasks on the cluster.
      cluster: where tasks tokenise, in place of processes of this machine.
      held_out: with `deduplicate`, the store of held-out data, whose records are left out of this
        one.
      shard_tokens: a file of tokens ends with the job that reaches this size; None: one file on a
        disk, files of `SHARD_TOKENS` in an object store, where a killed build continues after its
        last finished file.
    """

    source: DocumentSource
    tokenizer: Tokenizer
    config: StoreConfig
    workers: int = 1
    progress: Progress = lambda _: None
    shard_tokens: int | None = None
    cluster: RayCluster | None = None
    held_out: TokenStore | None = None

    @cached_property
    def signature(self) -> str:
        """The hash of the files and settings that determine the store."""
        return signature(self.source, self.tokenizer, self.config, content_of(self.held_out))


def content_of(store: TokenStore | None) -> str:
    """Returns the hash of a store's content; "" without a store."""
    return store.manifest["content"] if store else ""


def build_store(folder: AnyPath, build: Build) -> TokenStore:
    """Tokenises a dataset into a folder, unless it has a store of the same signature.

    Any other store there is replaced, file by file; other files in the folder stay. A link to a
    folder is followed.

    Raises:
      ConfigError: unreadable data, a dataset without documents, files that change during the build.
      TrainingError: a worker was killed.
      OSError: the folder cannot be written.
    """
    if is_remote(folder):
        return _build_remotely(folder, build)
    name = build.signature
    folder = Path(os.path.realpath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / f".lock-{folder.name}"):
        # Another process may have built it while this one waited for the lock.
        store = open_folder(folder)
        if store is not None and store.manifest["signature"] == name and store.blocks is not None:
            return store
        # A folder that is there may be a mount, or below one that cannot be written: nothing but it
        # is touched.
        beside = folder if folder.exists() else folder.parent
        remove_leftovers(beside)
        building = Path(tempfile.mkdtemp(prefix=BUILDING, dir=beside))
        try:
            manifest = _write_files(building, build, (), None)
            with writing_atomically(building / MANIFEST) as file:
                file.write(json.dumps(manifest, indent=1).encode())
            os.chmod(building, 0o755)  # mkdtemp lets nobody else read, and a cache may be shared.
            return _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _build_remotely(folder: AnyPath, build: Build) -> TokenStore:
    """Builds a store shard by shard on this machine's disk and copies each to an object store, the
    manifest last.
    """
    refusal = "is preparing it; wait for it, or give another folder"
    with (
        leased(folder, refusal) as check,
        tempfile.TemporaryDirectory(prefix=BUILDING) as temporary,
    ):
        shards = RemoteShards(folder, f"{build.signature} {CUTTING}")

        def keep(number: int, file: Path, shard: Shard) -> None:
            check()
            shards.keep(number, file, shard)

        itemsize = np.dtype(TokenLayout.from_config(build.config, build.tokenizer).dtype).itemsize
        finished, old = shards.found(itemsize), store_files(folder)
        shards.begin()

        local = Path(temporary)
        shard_tokens = build.shard_tokens or SHARD_TOKENS
        manifest = _write_files(
            local, dataclasses.replace(build, shard_tokens=shard_tokens), finished, keep
        )

        # A lease that lapsed meanwhile may be another builder's: ask before each step that shows.
        check()
        (folder / MANIFEST).unlink(missing_ok=True)  # of a replaced store
        for file in local.iterdir():
            upload(file, folder / file.name)
        check()
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
        shards.tidy(set(old) - {MANIFEST, *manifest["sizes"]})
    return _opened(folder)


def _opened(folder: AnyPath) -> TokenStore:
    store = open_folder(folder)
    if store is None:
        raise OSError(f"the store {folder} was damaged right after it was written")
    return store


@dataclass
class _Total:
    """The facts about the documents so far that are not in files."""

    content: hashlib.blake2b = field(default_factory=new_content_hash)
    held_out: list[int] = field(default_factory=list)
    # records left out, by the kind of their problem
    reasons: Counter[str] = field(default_factory=Counter)
    text_bytes: int = 0


def _write_files(
    folder: Path, build: Build, finished: Iterable[Shard], keep: KeepShard | None
) -> Manifest:
    """Writes the shards after those that are finished, and the files beside them; returns the
    manifest.
    """
    with (
        closing(GrowingTable(folder / OFFSETS)) as table,
        closing(GrowingHashes(folder)) as hashes,
        closing(GrowingPlaces(folder / RECORDS)) as places,
    ):
        return _written(folder, build, finished, keep, table, hashes, places)


def _written(
    folder: Path,
    build: Build,
    finished: Iterable[Shard],
    keep: KeepShard | None,
    table: GrowingTable,
    hashes: GrowingHashes,
    places: GrowingPlaces,
) -> Manifest:
    source, layout = build.source, TokenLayout.from_config(build.config, build.tokenizer)
    recipe = StoreRecipe.of(build.config.recipe)
    tokeniser = Tokeniser(
        source, build.tokenizer, layout, recipe.encoder(build.config, build.tokenizer)
    )
    # Equal records are compared by the digests of their documents.
    seen = (
        SeenRecords(folder, recipe.documents_per_record, build.held_out)
        if build.config.deduplicate
        else None
    )
    total, tokens, jobs_done = _Total(), list[int](), 0
    if source.missing_shards:
        total.reasons["a missing shard"] = len(source.missing_shards)

    def add(done: Tokenised) -> None:
        total.held_out += [table.documents + number for number in done.held_out]
        table.append(np.frombuffer(done.lengths, np.int64))
        places.append(done.records)
        total.content.update(done.digests)
        total.reasons.update(done.reasons)
        total.text_bytes += done.text_bytes
        build.progress(done.source_bytes)

    # What an earlier, killed build finished: its facts, and none of its tokens again.
    for shard in finished:
        add(shard.facts)
        if seen is not None:
            seen.duplicates(shard.facts.digests)  # has none, and is there from now on
        tokens.append(shard.facts.tokens)
        jobs_done += shard.jobs
        for block_hashes in shard.hashes:
            hashes.append(block_hashes)

    jobs = itertools.islice(source.jobs(), jobs_done, None)
    try:
        with ShardWriter(folder, build.shard_tokens, len(tokens), hashes, keep) as writer:
            for done in tokenise_all(
                tokeniser, jobs, writer, folder, _workers(build), build.cluster, seen
            ):
                add(done)
                writer.end_job(done)
    except ConfigError:
        # A file that changes while it is read looks damaged; report the change instead.
        source.refuse_changed()
        raise
    if not table.documents:
        raise source.error(
            f"holds no document ({total.reasons.total()} empty or unreadable records were left out"
            f"{reasons_text(total.reasons)})"
        )
    source.refuse_changed()

    itemsize = np.dtype(layout.dtype).itemsize
    sizes = [count * itemsize for count in (*tokens, *writer.sizes)]
    table.finish()
    checksum = hashes.append_table(table)
    content = total.content.hexdigest()
    hashes.write(folder / BLOCKS, content)

    facts = {
        "version": VERSION,
        "content": content,
        "documents": table.documents,
        "tokens": table.tokens,
        "text_bytes": total.text_bytes,
        "skipped_records": total.reasons.total(),
        **({"skipped_reasons": dict(sorted(total.reasons.items()))} if total.reasons else {}),
        "held_out": total.held_out,
        "tokenizer": build.tokenizer.identity,
        "vocab_size": build.tokenizer.vocab_size,
        **{name: value for name, value in dataclasses.asdict(layout).items() if value is not None},
        **({"conversations": tokeniser.encoder.identity} if tokeniser.encoder else {}),
        **({"deduplicated": True, "apart_from": content_of(build.held_out)} if seen else {}),
        "sizes": dict(zip(shard_names(len(sizes)), sizes, strict=True))
        | {name: (folder / name).stat().st_size for name in (OFFSETS, BLOCKS)},
        "offsets_crc32": checksum,
        "signature": build.signature,
        "place": source.place,
    }
    manifest: Manifest = json.loads(json.dumps(facts))  # as read later, with lists for tuples
    manifest["checksum"] = manifest_checksum(manifest)
    return manifest


def _workers(build: Build) -> int:
    """Returns the number of processes that tokenise.

    One process copies bytes of text files at disk speed; two workers took a third longer, because
    they copy tokens once more.
    """
    is_copy = (
        build.cluster is None
        and build.tokenizer.identity == "byte"
        and build.source.dataset_type in ("text", "python_stdlib")
    )
    return 1 if is_copy else build.workers


def _publish(building: Path, folder: Path) -> TokenStore:
    """Moves a finished store into place, whole or not at all: its manifest comes last, after the
    old one has gone.
    """
    if not folder.exists():
        os.rename(building, folder)
        return _opened(folder)
    new = sorted(building.iterdir(), key=lambda file: file.name == MANIFEST)
    old = store_files(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in set(old) - {file.name for file in new}:
        (folder / name).unlink(missing_ok=True)
    for file in new:
        os.replace(file, folder / file.name)
    return _opened(folder)
