"""The store of a dataset that a config names: prepared before, found in the cache, or made now.

The cache holds an entry per dataset, tokenizer and setting, found again as long as the files of the dataset stay
(path, size, time of change). Of processes that want a new entry one makes it, the others wait. `dataset_type=tokens`
names a store that `maxbatch prepare` made.
"""

from __future__ import annotations

import os
from pathlib import Path

from ml_collections import ConfigDict

from maxbatch.data.store.token_store import TokenStore, cache_folder, open_folder, signature
from maxbatch.data.store.tokenizers import Tokenizer, check_special_tokens
from maxbatch.system.errors import ConfigError


def find_store(config: ConfigDict, tokenizer: Tokenizer, key: str = "dataset_path") -> TokenStore | None:
    """Returns the store of the dataset that config[key] names (one source, no weights), or None where the cache
    has none that is whole. Builds nothing."""
    if config.dataset_type == "tokens":
        return _prepared_store(config, tokenizer, key)
    from maxbatch.data.store.documents import DocumentSource

    source = DocumentSource.from_config(config, key)
    return open_folder(cache_folder(config) / signature(source, tokenizer, config))


def open_store(config: ConfigDict, tokenizer: Tokenizer, key: str = "dataset_path") -> TokenStore:
    """Returns the store of the dataset that config[key] names (one source, no weights), made now where there is
    none or a damaged one.

    Raises:
      ConfigError: data that cannot be read, a dataset without documents, files that change while they are
        read, a cache that cannot be written, a tokenizer without the special tokens that are asked for, or a
        prepared store of another tokenizer or other special tokens.
    """
    if config.dataset_type == "tokens":
        return _prepared_store(config, tokenizer, key)
    from maxbatch.data.store.builder import build_store, default_workers
    from maxbatch.data.store.documents import DocumentSource

    source = DocumentSource.from_config(config, key)
    folder = cache_folder(config) / signature(source, tokenizer, config)
    if (store := open_folder(folder)) is not None:
        return store
    check_special_tokens(config, tokenizer)
    try:
        return build_store(folder, source, tokenizer, config, workers=default_workers(source))
    except OSError as error:
        raise ConfigError(
            f"data_cache_dir={config.data_cache_dir!r}: cannot write tokenised data to {cache_folder(config)}: "
            f"{error.strerror or error}; data_cache_dir=/a/writable/folder puts it elsewhere"
        ) from error


def _prepared_store(config: ConfigDict, tokenizer: Tokenizer, key: str) -> TokenStore:
    value = config[key]
    folder = Path(os.path.expanduser(value)).absolute()
    where = f"{key}={value!r}"
    if not value or not folder.is_dir():
        raise ConfigError(f"{where}: dataset_type=tokens needs a folder that `maxbatch prepare` wrote")
    if (store := open_folder(folder)) is None:
        problem = "is damaged or of another version; make it again" if _looks_prepared(folder) else "is none"
        raise ConfigError(
            f"{where}: dataset_type=tokens needs a folder that `maxbatch prepare` wrote, and this {problem}"
        )
    manifest = store.manifest
    if manifest["tokenizer"] != tokenizer.identity:
        raise ConfigError(
            f"tokenizer_type={config.tokenizer_type}, tokenizer_path={config.tokenizer_path!r}: {where} was "
            f"prepared with tokenizer {manifest['tokenizer']!r}, and this is {tokenizer.identity!r}"
            + ("; works: tokenizer_type=byte tokenizer_path=''" if manifest["tokenizer"] == "byte" else "")
        )
    for key in ("add_bos", "add_eos"):
        prepared = bool(manifest[key.removeprefix("add_")])
        if config[key] != prepared:
            stated, works = (str(value).lower() for value in (config[key], prepared))
            raise ConfigError(
                f"{key}={stated}: {where} was prepared with the other value; works: {key}={works}"
            )
    return store


def _looks_prepared(folder: Path) -> bool:
    return (folder / "manifest.json").exists() and (folder / "tokens.bin").exists()
