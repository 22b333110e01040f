"""The token store of the dataset that a config names: prepared earlier, found in the cache, or
built now.

The cache holds one store per content, tokenizer and settings; a dataset whose files were moved,
copied or touched has the store that it had (`maxbatch.data.store.file_contents`). If several
processes need a new store, one builds it and the others wait. `dataset_type=tokens` names a store
that `maxbatch prepare` wrote, `dataset_type=megatron` one of Megatron-LM.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from maxbatch.config.combined import StoreConfig
from maxbatch.config.values import shown
from maxbatch.data.store.cache_folder import cache_folder, writing_cache
from maxbatch.data.store.recipe import StoreRecipe
from maxbatch.data.store.store import Manifest, Store
from maxbatch.data.store.token_store import (
    TokenStore,
    known_signature,
    load_folder,
    open_folder,
    signature,
    was_prepared,
)
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.system.errors import ConfigError, StoreRefused
from maxbatch.system.storage.contents import content_stamp
from maxbatch.system.storage.storage import AnyPath, as_path, is_remote
from maxbatch.system.storage.watched_files import watch
from maxbatch.system.terminal.warning import warn_once


def find_store(
    config: StoreConfig,
    tokenizer: Tokenizer,
    key: str = "dataset_path",
    whole: StoreConfig | None = None,
) -> Store | None:
    """Returns the store of the dataset (not a mixture) that config[key] names, or None if the cache
    has none.

    `whole` is the config of the mixture of which this dataset is a source.
    """
    if config.dataset_type == "tokens":
        return _prepared_store(config, tokenizer, key)
    if config.dataset_type == "megatron":
        from maxbatch.data.store.megatron import open_megatron

        return open_megatron(config, key, reads=False)
    from maxbatch.data.store.documents import DocumentSource

    content = ""
    if leaves_out_held_out(config, key, whole):
        held_out = find_store(whole or config, tokenizer, "eval_dataset_path")
        if held_out is None:
            return None
        content = held_out.manifest["content"]
    source = DocumentSource.from_config(config, key)
    name = known_signature(source, tokenizer, config, content)
    return None if name is None else _cached_store(cache_folder(config.data_cache_dir) / name)


def leaves_out_held_out(config: StoreConfig, key: str, whole: StoreConfig | None = None) -> bool:
    """Returns whether the dataset that config[key] names has no record of `eval_dataset_path`."""
    return (
        config.deduplicate and key == "dataset_path" and bool((whole or config).eval_dataset_path)
    )


def open_store(
    config: StoreConfig,
    tokenizer: Tokenizer,
    key: str = "dataset_path",
    whole: StoreConfig | None = None,
) -> Store:
    """Returns the store of the dataset (not a mixture) that config[key] names; builds it unless the
    cache has it.

    `whole` is the config of the mixture of which this dataset is a source.

    Raises:
      ConfigError: data that cannot be read, a dataset without documents, files that change while
        they are read, a cache that cannot be written, a tokenizer that lacks the special tokens, or
        a prepared store of another tokenizer or with other special tokens.
    """
    if config.dataset_type == "tokens":
        return _prepared_store(config, tokenizer, key)
    if config.dataset_type == "megatron":
        from maxbatch.data.store.megatron import open_megatron

        return open_megatron(config, key)
    from maxbatch.data.store.builder import Build, build_store, content_of, default_workers
    from maxbatch.data.store.documents import DocumentSource
    from maxbatch.system.terminal.bars import bytes_bar

    held_out = open_held_out(config, tokenizer, key, whole)
    source = DocumentSource.from_config(config, key)
    name = signature(source, tokenizer, config, content_of(held_out))
    folder = cache_folder(config.data_cache_dir) / name
    if (store := _cached_store(folder)) is not None:
        _warn_without_hashes(store)
        return _load_watched(folder)
    writing = writing_cache(config.data_cache_dir, cache_folder(config.data_cache_dir))
    with writing, bytes_bar(source.size, f"tokenising {key}") as progress:
        build = Build(
            source, tokenizer, config, default_workers(source), progress, held_out=held_out
        )
        build_store(folder, build)
    return _load_watched(folder)


def _load_watched(folder: AnyPath) -> TokenStore:
    """Returns the store in a folder, whose files the run under way watches from before they are
    read.

    Those of an object store are compared with their hashes at every read instead.
    """
    if is_remote(folder):
        return load_folder(folder)
    stamps = {}
    with contextlib.suppress(OSError):  # loading names what is wrong
        stamps = {file.name: content_stamp(file) for file in folder.iterdir() if file.is_file()}
    store = load_folder(folder)
    for name in store.manifest["sizes"]:
        watch(folder / name, stamps[name], partial(store.is_unchanged, name))
    return store


def open_held_out(
    config: StoreConfig,
    tokenizer: Tokenizer,
    key: str = "dataset_path",
    whole: StoreConfig | None = None,
) -> TokenStore | None:
    """Returns the store of held-out data whose records the dataset leaves out, or None; builds it
    if need be.
    """
    if not leaves_out_held_out(config, key, whole):
        return None
    store = open_store(whole or config, tokenizer, "eval_dataset_path")
    assert isinstance(store, TokenStore), "a rule refuses duplicates of other stores"
    return store


def _cached_store(folder: Path) -> TokenStore | None:
    """Returns the store in a folder of the cache, unless it is damaged or belongs to another
    dataset.
    """
    store = open_folder(folder)
    return store if store is not None and store.manifest["signature"] == folder.name else None


def _warn_without_hashes(store: TokenStore) -> None:
    if store.blocks is None:
        warn_once(
            f"{store.folder}: the tokenised data were made without hashes of their blocks, so "
            "damage to them goes unnoticed; to add hashes, remove the folder and prepare them "
            "again"
        )


def _prepared_store(config: StoreConfig, tokenizer: Tokenizer, key: str) -> TokenStore:
    value = config[key]
    folder = as_path(value)
    where = f"{key}={shown(repr(value))}"
    needs = f"{where}: dataset_type=tokens needs a folder that `maxbatch prepare` wrote"
    if not value or not folder.is_dir():
        raise ConfigError(needs)
    try:
        store = _load_watched(folder)
    except StoreRefused:  # an object store that refuses, or does not answer
        raise
    except ConfigError as error:
        if not was_prepared(folder):
            raise ConfigError(f"{needs}, and this is not one") from error
        raise ConfigError(f"{needs}, and this is damaged or of another version: {error}") from error
    _warn_without_hashes(store)
    manifest = store.manifest
    if manifest["tokenizer"] != tokenizer.identity:
        raise ConfigError(
            f"tokenizer_type={config.tokenizer_type}, "
            f"tokenizer_path={shown(repr(config.tokenizer_path))}: {where} was prepared with "
            f"tokenizer {shown(repr(manifest['tokenizer']))}, and this is {tokenizer.identity!r}"
            + (
                "; works: tokenizer_type=byte tokenizer_path=''"
                if manifest["tokenizer"] == "byte"
                else ""
            )
        )
    _check_prepared_settings(config, where, manifest)
    return store


def _check_prepared_settings(config: StoreConfig, where: str, manifest: Manifest) -> None:
    """Raises ConfigError for a store of documents or conversations that were made with other
    settings.
    """
    made = manifest.get("conversations")
    prepared: dict[str, object] = {
        recipe.key: recipe.has_made(made) for recipe in StoreRecipe.flagged()
    }
    recipe = StoreRecipe.of(config.recipe)
    if recipe.has_answers == (made is not None):
        prepared |= recipe.prepared_settings(manifest)
    for key, value in prepared.items():
        if config[key] != value:
            value_text, works = (str(flag).lower() for flag in (config[key], value))
            raise ConfigError(
                f"{key}={value_text}: {where} was prepared with the other value; works: {key}={works}"
            )
