"""The builder of token stores.

A build is atomic, runs once if several processes want the store, and gives the same bytes for any number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from maxbatch.data.store.conversations import Conversations, RecordError
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.token_store import (
    FILES,
    VERSION,
    TokenLayout,
    TokenStore,
    new_content_hash,
    open_folder,
    signature,
)
from maxbatch.data.store.tokenise import Tokenised, Tokeniser, tokenise_all
from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.system.atomic_files import BUILDING, remove_leftovers, write_atomically, writing_atomically
from maxbatch.system.errors import ConfigError
from maxbatch.system.leases import take_lease
from maxbatch.system.locks import exclusive
from maxbatch.system.remote_path import RemotePath
from maxbatch.system.storage import AnyPath

# Below this size, starting worker processes takes longer than the work.
_WORTH_WORKERS_BYTES = 32 << 20
_COPIED_BYTES = 8 << 20

Progress = Callable[[int], None]  # called with the bytes of the files that were tokenised since the last call


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(source: DocumentSource) -> int:
    """Returns the number of processes that tokenise a dataset: one per core, or 1 if it is small."""
    return num_cores() if source.size >= _WORTH_WORKERS_BYTES else 1


def build_store(
    folder: AnyPath,
    source: DocumentSource,
    tokenizer: Tokenizer,
    config: ConfigDict,
    *,
    workers: int = 1,
    progress: Progress = lambda _: None,
) -> TokenStore:
    """Tokenises a dataset into a folder, unless a store of the same signature is there; replaces any other.

    Raises:
      ConfigError: data that cannot be read, a dataset without documents, files that change meanwhile.
      TrainingError: a worker was killed.
      OSError: the folder cannot be written.
    """
    if isinstance(folder, RemotePath):
        return _build_and_upload(folder, source, tokenizer, config, workers=workers, progress=progress)
    name = signature(source, tokenizer, config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / f".lock-{folder.name}"):
        store = open_folder(folder)  # Another process may have built it while this one waited for the lock.
        if store is not None and store.manifest["signature"] == name:
            return store
        remove_leftovers(folder.parent)
        building = Path(tempfile.mkdtemp(prefix=BUILDING, dir=folder.parent))
        try:
            manifest = _write_files(building, source, tokenizer, config, workers, progress)
            with writing_atomically(building / "manifest.json") as file:
                file.write(json.dumps({**manifest, "signature": name}, indent=1).encode())
            os.chmod(building, 0o755)  # mkdtemp lets nobody else read, and a cache may be shared.
            return _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _build_and_upload(
    folder: RemotePath,
    source: DocumentSource,
    tokenizer: Tokenizer,
    config: ConfigDict,
    *,
    workers: int,
    progress: Progress,
) -> TokenStore:
    """Builds a store on this machine's disk and copies it to an object store, its manifest last."""
    lease = take_lease(folder / ".lease")
    if isinstance(lease, str):
        raise ConfigError(f"{folder}: {lease} is preparing it; wait for it, or give another folder")
    with contextlib.closing(lease), tempfile.TemporaryDirectory(prefix=BUILDING) as temporary:
        local = Path(temporary, "store")
        build_store(local, source, tokenizer, config, workers=workers, progress=progress)
        lease.check()
        (folder / "manifest.json").unlink(missing_ok=True)  # of a store that this one takes the place of
        for name in FILES:
            with open(local / name, "rb") as built, writing_atomically(folder / name) as file:
                shutil.copyfileobj(built, file, _COPIED_BYTES)
        lease.check()
        write_atomically(folder / "manifest.json", (local / "manifest.json").read_bytes())
    store = open_folder(folder)
    if store is None:
        raise OSError(f"the store {folder} was damaged right after it was written")
    return store


def _write_files(
    folder: Path, source: DocumentSource, tokenizer: Tokenizer, config: ConfigDict, workers: int, progress: Progress
) -> dict[str, Any]:
    layout = TokenLayout.of(tokenizer, config)
    conversations = Conversations.from_config(config, tokenizer)
    tokeniser = Tokeniser(source, tokenizer, layout, conversations)
    if tokenizer.identity == "byte" and source.dataset_type in ("text", "python_stdlib"):
        # One process copies the bytes of text files as fast as the disk allows. Two workers took a third longer, since
        # their tokens have to be copied once more.
        workers = 1
    total, content = Tokenised(0, skipped=len(source.missing_shards)), new_content_hash()
    try:
        with writing_atomically(folder / "tokens.bin") as file:
            for done in tokenise_all(tokeniser, source.jobs(), file, folder, workers):
                total.append(done)
                content.update(done.digests)
                progress(done.source_bytes)
    except RecordError as error:
        number = 1 + len(total.lengths) + total.skipped - len(source.missing_shards) + error.number
        left_out = "skip_bad_records=true leaves such records out"
        raise source.error(f"record {number}: {error.problem}; {left_out}") from error
    except ConfigError:
        # A file that changes while it is read looks damaged; report the change instead.
        source.refuse_changed()
        raise
    if not total.lengths:
        raise source.error(f"holds no document ({total.skipped} empty or unreadable records were left out)")
    source.refuse_changed()
    offsets = np.zeros(len(total.lengths) + 1, np.int64)
    np.cumsum(np.frombuffer(total.lengths, np.int64), out=offsets[1:])
    with writing_atomically(folder / "offsets.npy") as file:
        np.save(file, offsets)
    return {
        "version": VERSION,
        "content": content.hexdigest(),
        "documents": len(total.lengths),
        "tokens": int(offsets[-1]),
        "text_bytes": total.text_bytes,
        "skipped_records": total.skipped,
        "held_out": total.held_out,
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        **{name: value for name, value in dataclasses.asdict(layout).items() if value is not None},
        **({"conversations": conversations.identity} if conversations else {}),
        "sizes": {name: (folder / name).stat().st_size for name in FILES},
        "offsets_crc32": zlib.crc32((folder / "offsets.npy").read_bytes()),
    }


def _publish(building: Path, folder: Path) -> TokenStore:
    """Renames a finished store into place; removes what is there, a damaged store or one of an older dataset."""
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=folder.parent, ignore_cleanup_errors=True) as old:
        if folder.exists():
            os.rename(folder, old)
        os.rename(building, folder)
    store = open_folder(folder)
    if store is None:
        raise OSError(f"the store {folder} was damaged right after it was written")
    return store
