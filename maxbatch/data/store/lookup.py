"""The token store of the dataset that a config names: prepared before, found in the cache, or built now.

The cache holds one store per dataset, tokenizer and settings, and finds it again as long as the dataset's files stay
the same (path, size, time of change). If several processes need a new store, one builds it and the others wait.
`dataset_type=tokens` names a store that `maxbatch prepare` wrote.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from maxbatch.config.values import shown
from maxbatch.data.store.cache_folder import cache_folder, cannot_write_cache
from maxbatch.data.store.token_store import TokenStore, open_folder, signature, was_prepared
from maxbatch.data.store.tokenizers import Tokenizer
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import as_path


def find_store(config: ConfigDict, tokenizer: Tokenizer, key: str = "dataset_path") -> TokenStore | None:
    """Returns the store of the dataset (not a mixture) that config[key] names, or None if the cache has none."""
    if config.dataset_type == "tokens":
        return _prepared_store(config, tokenizer, key)
    from maxbatch.data.store.documents import DocumentSource

    source = DocumentSource.from_config(config, key)
    return open_folder(cache_folder(config) / signature(source, tokenizer, config))


def open_store(config: ConfigDict, tokenizer: Tokenizer, key: str = "dataset_path") -> TokenStore:
    """Returns the store of the dataset (not a mixture) that config[key] names; builds it unless the cache has it.

    Raises:
      ConfigError: data that cannot be read, a dataset without documents, files that change while they are read, a
        cache that cannot be written, a tokenizer that lacks the special tokens, or a prepared store of another
        tokenizer or with other special tokens.
    """
    if config.dataset_type == "tokens":
        return _prepared_store(config, tokenizer, key)
    from maxbatch.data.store.builder import Build, build_store, default_workers
    from maxbatch.data.store.documents import DocumentSource
    from maxbatch.system.bars import bytes_bar

    source = DocumentSource.from_config(config, key)
    folder = cache_folder(config) / signature(source, tokenizer, config)
    if (store := open_folder(folder)) is not None:
        return store
    try:
        with bytes_bar(source.size, f"tokenising {key}") as progress:
            return build_store(folder, Build(source, tokenizer, config, default_workers(source), progress))
    except OSError as error:
        raise cannot_write_cache(config, cache_folder(config), error) from error


def _prepared_store(config: ConfigDict, tokenizer: Tokenizer, key: str) -> TokenStore:
    value = config[key]
    folder = as_path(value)
    where = f"{key}={shown(repr(value))}"
    needs = f"{where}: dataset_type=tokens needs a folder that `maxbatch prepare` wrote"
    if not value or not folder.is_dir():
        raise ConfigError(needs)
    if (store := open_folder(folder)) is None:
        damaged = was_prepared(folder)
        problem = "is damaged or of another version; prepare it again" if damaged else "is not one"
        raise ConfigError(f"{needs}, and this {problem}")
    manifest = store.manifest
    if manifest["tokenizer"] != tokenizer.identity:
        raise ConfigError(
            f"tokenizer_type={config.tokenizer_type}, tokenizer_path={shown(repr(config.tokenizer_path))}: {where} was "
            f"prepared with tokenizer {shown(repr(manifest['tokenizer']))}, and this is {tokenizer.identity!r}"
            + ("; works: tokenizer_type=byte tokenizer_path=''" if manifest["tokenizer"] == "byte" else "")
        )
    _check_prepared_settings(config, where, manifest)
    return store


def _check_prepared_settings(config: ConfigDict, where: str, manifest: dict[str, Any]) -> None:
    """Raises ConfigError for a store whose documents or conversations were made otherwise than the config asks for."""
    made = manifest.get("conversations")
    prepared = {"use_sft": made is not None}
    if not config.use_sft:
        prepared |= {key: bool(manifest[key.removeprefix("add_")]) for key in ("add_bos", "add_eos")}
    elif made:
        prepared["sft_train_on_completion_only"] = made["completion_only"]
    for key, value in prepared.items():
        if config[key] != value:
            stated, works = (str(flag).lower() for flag in (config[key], value))
            raise ConfigError(f"{key}={stated}: {where} was prepared with the other value; works: {key}={works}")
