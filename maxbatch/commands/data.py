"""`maxbatch data`: prints the samples of the stream, as text or JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from maxbatch.commands.arguments import add_config, config_of, count, whole
from maxbatch.data.stream.bad_records import BadRecord, bad_records
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.data.tokenizers.tokenizer import Tokenizer
from maxbatch.plan.holes import NO_HOLES, Holes
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal.folding import counted, printable
from maxbatch.system.terminal.terminal import PipeConsole

_DEFAULT_COUNT = 3
_BLOCK_ROWS = 256


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--fingerprint", action="store_true", help="print the fingerprint of the samples instead"
    )
    what.add_argument(
        "--stats",
        action="store_true",
        help="print the figures of one epoch instead; of a mixture, of each source",
    )
    what.add_argument(
        "--bad",
        action="store_true",
        help="list the records that are left out, cut or split, and why; reads all of them",
    )
    parser.add_argument("--first", type=whole(0), metavar="S", help="first sample (default 0)")
    parser.add_argument(
        "--count", type=count, metavar="N", help=f"number of samples (default {_DEFAULT_COUNT})"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one object, or one per sample"
    )


def run(args: Namespace) -> int:
    """Prints samples, their fingerprint, or the figures of an epoch; returns the exit code.

    Raises:
      ConfigError: a config or data that cannot be used.
    """
    config = config_of(args, needs=["stream"])
    recipe = config.recipe
    if recipe.is_sampled and not args.bad:
        raise ConfigError(
            f"batch_size={config.batch_size}: counts prompts, and maxbatch data does not show a "
            "stream of prompts, but --bad lists their bad records; works: batch_size=null, for "
            "documents"
        )
    first = args.first or 0
    stop = first + (args.count or _DEFAULT_COUNT)
    if (args.stats or args.bad) and not (args.first is args.count is None):
        flag, what = (
            ("--stats", "counts a whole epoch") if args.stats else ("--bad", "reads all records")
        )
        raise ConfigError(f"{flag}: {what}; leave out --first and --count")
    if args.bad:
        if recipe.is_sampled:
            from maxbatch.kinds.prompt.bad_prompts import bad_prompts

            records = bad_prompts(config.prompting)
        else:
            records = bad_records(config.stream)
        _print_bad(records, args.json)
        return 0
    # Samples are shown by their own numbers.
    kept = open_stream(config)
    stream, holes = replace(kept, holes=NO_HOLES), kept.holes
    if args.stats:
        _print_stats(stream, args.json)
    elif args.fingerprint:
        begins = range(holes.kept_before(first), end := holes.kept_before(stop), _BLOCK_ROWS)
        digits = fingerprint(kept.read(begin, min(begin + _BLOCK_ROWS, end)) for begin in begins)
        print(
            json.dumps({"first": first, "count": stop - first, "fingerprint": digits})
            if args.json
            else digits
        )
    elif args.json:
        for index in range(first, stop):
            left_out = {"left_out": True} if index in holes else {}
            print(json.dumps(_sample_record(stream, index) | left_out))
    else:
        _print_samples(stream, holes, first, stop, chats=recipe.has_answers)
    return 0


def _print_bad(records: Iterable[BadRecord], as_json: bool) -> None:
    count = 0
    for record in records:
        count += 1
        if as_json:
            print(json.dumps(record._asdict()))
        else:
            print(printable(f"{record.file}:{record.record}: {record.effect}: {record.reason}"))
    if not as_json:
        print(f"{counted(count, 'record')} left out, cut, split or refused")


def _sample_record(stream: Stream, index: int) -> dict[str, object]:
    sample, source = stream[index], stream.row(index).source
    return {
        "sample": index,
        **({} if source is None else {"source": source}),
        "text": stream.tokenizer.decode(sample["tokens"]),
        **{name: array.tolist() for name, array in sample.items()},
    }


def _print_stats(stream: Stream, as_json: bool) -> None:
    stats = stream.stats()
    if as_json:
        print(json.dumps(stats))
        return
    sources: dict[str, dict[str, int | float]] = stats.pop("sources", {})
    console = PipeConsole()
    table = Table("each source once" if sources else "one epoch", box=box.SIMPLE)
    table.add_column("", justify="right")
    for name, value in stats.items():
        table.add_row(name, _figure(value))
    console.print(table)
    for source, figures in sources.items():
        line = "  ".join(f"{name} {_figure(value)}" for name, value in figures.items())
        console.print(Text(f"{source}:  {line}"), soft_wrap=True)


def _figure(value: int | float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return f"{value['mean']:,.1f} ± {value['std']:,.1f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6f}"


def _print_samples(stream: Stream, holes: Holes, start: int, stop: int, chats: bool) -> None:
    # Neither wrap nor highlight: a line of a sample is a line of output.
    console = PipeConsole(highlight=False, soft_wrap=True)
    for index in range(start, stop):
        place = stream.row(index)
        sample = stream[index]
        segments = sample["segments"]
        filled = np.count_nonzero(segments)
        head = (
            f"== sample {index}  epoch {place.epoch}  row {place.row}  tokens "
            f"{filled}/{len(segments)}"
        )
        head += f"  segments {segments.max()}  loss_weight {sample['weights'].sum():g}"
        if place.source is not None:
            head += f"  source {place.source}"
        if index in holes:
            head += "  left out by skip_samples"
        console.print(Text(head, style="bold"))
        for segment in range(1, int(segments.max()) + 1):
            of_segment = segments == segment
            console.print(
                Text(f"-- segment {segment}  tokens {np.count_nonzero(of_segment)}", style="cyan")
            )
            ids, weights = sample["tokens"][of_segment], sample["weights"][of_segment]
            console.print(
                _conversation(ids, weights, stream.tokenizer)
                if chats
                else _readable(ids, stream.tokenizer)
            )
        if filled < len(segments):
            console.print(Text(f"-- padding {len(segments) - filled}", style="dim"))


def _readable(ids: np.ndarray, tokenizer: Tokenizer) -> Text:
    """Returns the text of ids, with names for special tokens and escapes for control characters."""
    named = ((tokenizer.pad_id, "<pad>"), (tokenizer.bos_id, "<bos>"), (tokenizer.eos_id, "<eos>"))
    names = {token: name for token, name in named if token is not None}
    special = np.flatnonzero(np.isin(ids, list(names)))
    text = Text()
    begin = 0
    for place in (*special, len(ids)):
        text.append(printable(tokenizer.decode(ids[begin:place])))
        if place < len(ids):
            text.append(names[int(ids[place])], style="bold magenta")
        begin = place + 1
    return text


def _conversation(ids: np.ndarray, weights: np.ndarray, tokenizer: Tokenizer) -> Text:
    """Returns the text of a conversation, special tokens spelled out, trained tokens coloured."""
    text = Text()
    changes = np.flatnonzero(np.diff(weights)) + 1
    for part, weight in zip(np.split(ids, changes), weights[[0, *changes]], strict=True):
        text.append(printable(tokenizer.decode_markup(part)), style="green" if weight else "dim")
    return text
