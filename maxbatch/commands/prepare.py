"""`maxbatch prepare`: tokenises a dataset into a folder, which `dataset_type=tokens` reads."""

from __future__ import annotations

import shlex
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from maxbatch.commands.arguments import (
    add_config,
    add_ray,
    config_of,
    count,
    place,
    ray_cluster,
    whole,
)
from maxbatch.config.combined import StreamConfig
from maxbatch.config.keys import Fixes
from maxbatch.config.rules import check_data_paths
from maxbatch.config.sections import STORES, names_fixing
from maxbatch.config.values import shown
from maxbatch.data.store.builder import Build, build_store, content_of, num_cores
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.lookup import open_held_out
from maxbatch.data.store.skipped import skipped_text
from maxbatch.data.store.token_store import (
    TokenStore,
    load_folder,
    open_folder,
    signature,
    was_prepared,
)
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.data.tokenizers.tokenizers import make_tokenizer
from maxbatch.system.errors import ConfigError, StoreRefused, writing
from maxbatch.system.storage.fences import BUILDING
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.system.terminal.bars import bytes_bar
from maxbatch.system.terminal.folding import printable
from maxbatch.system.terminal.warning import note

_MOST_WORKERS = 1024
# of a task on a cluster: a tokenizer that crashes its worker process must not do so for ever
_RETRIES = 5


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    where = parser.add_mutually_exclusive_group(required=True)
    for flag, what in (
        ("--output", "write the tokenised dataset there, whole or not at all"),
        ("--verify", "read a prepared folder and check its content"),
    ):
        where.add_argument(flag, type=place, metavar="FOLDER", help=what)
    shard = "approximate tokens per file (default: one file; in a bucket 2^30)"
    parser.add_argument("--shard-tokens", type=count, metavar="N", help=shard)
    most = (
        "most processes that tokenise (default: the cores), or most tasks of --ray (default: as "
        "many as fit)"
    )
    parser.add_argument(
        "--workers", type=whole(1, _MOST_WORKERS, works=num_cores()), metavar="N", help=most
    )
    add_ray(parser, "the tokenising")


def run(args: Namespace) -> int:
    """Prepares the dataset of a config, or verifies a prepared one; returns the exit code.

    Raises:
      ConfigError: a dataset, tokenizer or folder that cannot be used, or a damaged store.
      TrainingError: a worker was killed.
    """
    config = config_of(args, needs=["stream"]).stream
    if args.verify is not None:
        if args.ray is not None or args.resources:
            raise ConfigError(
                "--ray: --verify reads on this machine alone; works: --verify without --ray"
            )
        _verify(args.verify)
        return 0
    _check_dataset(config)
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    check_data_paths(config)
    held_out = open_held_out(config, tokenizer)
    source = DocumentSource.from_config(config)
    folder = as_path(args.output)
    store = _unchanged(
        folder, source, lambda: signature(source, tokenizer, config, content_of(held_out))
    )
    if store is not None:
        print(printable(f"unchanged: {_figures(store)} in {args.output}"))
    else:
        begin = time.perf_counter()
        with (
            ray_cluster(args, _RETRIES) as cluster,
            writing(f"--output {folder}"),
            bytes_bar(source.size, "tokenising") as progress,
        ):
            workers = args.workers or (cluster.num_slots if cluster else num_cores())
            build = Build(
                source, tokenizer, config, workers, progress, args.shard_tokens, cluster, held_out
            )
            store = build_store(folder, build)
        rate = store.manifest["text_bytes"] / 1e6 / (time.perf_counter() - begin)
        print(printable(f"{_figures(store)}, {rate:,.1f} MB/s, in {args.output}"))
    _print_next(config, args, tokenizer)
    return 0


def _check_dataset(config: StreamConfig) -> None:
    if config.dataset_type in ("synthetic", *STORES):
        what = (
            "is computed, not read" if config.dataset_type == "synthetic" else "is prepared already"
        )
        settings = [f"{name}={config[name]}" for name in ("dataset_type", "dataset_path")]
        works = (
            shlex.join(["maxbatch", "train", *settings])
            if config.dataset_path
            else "dataset_type=python_stdlib"
        )
        raise ConfigError(f"dataset_type={config.dataset_type}: {what}; works: {works}")
    sources = read_mixture(config)
    if sources is not None:
        raise ConfigError(
            f"dataset_path={shown(repr(config.dataset_path))}: a mixture is prepared source by "
            "source, each into its own folder; works: "
            f"dataset_path={shlex.quote(str(sources[0].config.dataset_path))}"
        )


def _unchanged(
    folder: AnyPath, source: DocumentSource, signature_of_dataset: Callable[[], str]
) -> TokenStore | None:
    """Returns the store in the output folder if it has the dataset's signature.

    Raises:
      ConfigError: the folder has other files, or another dataset's store.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise ConfigError(
            f"--output {folder}: is not a folder; works: --output {shlex.quote(f'{folder}-tokens')}"
        )
    if (store := open_folder(folder)) is not None:
        if store.manifest["signature"] == signature_of_dataset():
            # one without hashes is made again, which adds them
            return store if store.blocks is not None else None
        if store.manifest.get("place", source.place) != source.place:
            raise ConfigError(
                f"--output {folder}: holds another dataset's store ({_figures(store)}); remove "
                f"it, or give another folder; works: --output {shlex.quote(f'{folder}-2')}"
            )
        note(f"--output {folder}: replaces {_figures(store)}, of older content or other settings")
        return None
    others = [path for path in folder.iterdir() if not path.name.startswith(BUILDING)]
    if others and not was_prepared(folder):
        raise ConfigError(
            f"--output {folder}: the folder has files that are not a prepared dataset's; "
            f"works: --output {shlex.quote(str(folder / 'tokens'))}"
        )
    return None


def _verify(text: str) -> None:
    folder = as_path(text)
    try:
        store = load_folder(folder)
    except StoreRefused:  # an object store that refuses or does not answer
        raise
    except ConfigError as error:
        raise ConfigError(
            f"--verify {shown(text)}: not a prepared dataset, or a damaged one: {error}"
        ) from error
    store.verify()
    print(printable(f"intact: {_figures(store)} in {text}"))


def _figures(store: TokenStore) -> str:
    manifest = store.manifest
    figures = f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens"
    if manifest["skipped_records"]:
        figures += (
            f", {skipped_text(manifest['skipped_records'], manifest.get('skipped_reasons', {}))}"
        )
    return figures


def _print_next(config: StreamConfig, args: Namespace, tokenizer: Tokenizer) -> None:
    """Prints the command that trains on the folder: the typed arguments without those that the
    folder fixes.
    """
    settings = {"dataset_type": "tokens", "dataset_path": args.output}
    if config.vocab_size < tokenizer.vocab_size:
        settings["vocab_size"] = str(tokenizer.vocab_size)
    if config.deduplicate:
        # the folder has no duplicates, and a prepared one takes no other value
        settings["deduplicate"] = "false"
    if config.eval_dataset_path:
        settings["eval_dataset_path"] = f"{args.output}-eval"
        of_eval = _restated(
            args.config, {"dataset_path": config.eval_dataset_path, "eval_dataset_path": ""}
        )
        print("prepare the held-out data with a command of their own:")
        argv = ["maxbatch", "prepare", *of_eval, "--output", settings["eval_dataset_path"]]
        print(printable("  " + shlex.join(argv)))
    # A prepared folder fixes the reading of records, so the training command need not state it.
    settled = names_fixing(Fixes.RECORDS)
    typed = [text for text in args.config if text.split("=", 1)[0] not in settled]
    print(printable("next: " + shlex.join(["maxbatch", "train", *_restated(typed, settings)])))


def _restated(typed: list[str], settings: dict[str, str]) -> list[str]:
    """Returns the typed arguments with some keys replaced."""
    kept = [text for text in typed if text.split("=", 1)[0] not in settings]
    return [*kept, *(f"{key}={value}" for key, value in settings.items())]
