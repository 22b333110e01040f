"""A stream with holes is the stream of a list that leaves the samples out, whatever it is made of."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.config.config import Config
from maxbatch.data.store.builder import Build, build_store
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.own import as_stream
from maxbatch.data.stream.reader import Contiguous
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.plan.holes import NO_HOLES, Holes
from tests.helpers.chats import chat_config, some_talks
from tests.helpers.corpus import (
    LENGTH,
    jsonl_config,
    mixture_config,
    rows_of,
    same,
    some_texts,
    synthetic_config,
    write_jsonl,
)
from tests.helpers.megatron_stores import some_documents, write_megatron

SPEC = "3:5 17:40 60:61"


def of_texts(folder: Path) -> Config:
    return jsonl_config(folder / "a.jsonl", some_texts(80))


def of_a_mixture(folder: Path) -> Config:
    for name, seed in (("web", 0), ("code", 1)):
        write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in some_texts(40, seed)])
    return mixture_config(
        f"{{0: {{{folder}/web.jsonl: 0.7, {folder}/code.jsonl: 0.3}}, "
        f"30: {{{folder}/web.jsonl: 0.2, {folder}/code.jsonl: 0.8}}}}"
    )


def of_conversations(folder: Path) -> Config:
    return chat_config(folder, some_talks(40), "packing=false")


def of_pairs(folder: Path) -> Config:
    pairs = [{"prompt": text, "chosen": "yes", "rejected": text[:3]} for text in some_texts(40)]
    write_jsonl(folder / "pairs.jsonl", pairs)
    stated = ("use_dpo=true", "dataset_type=jsonl", f"dataset_path={folder}/pairs.jsonl")
    return load_config(overrides=[*stated, "max_target_length=64"])


def of_a_prepared_store(folder: Path) -> Config:
    source = jsonl_config(folder / "a.jsonl", some_texts(80)).store
    build = Build(DocumentSource.from_config(source), ByteTokenizer(), source)
    store = build_store(folder / "store", build)
    stated = ("dataset_type=tokens", f"dataset_path={store.folder}", f"max_target_length={LENGTH}")
    return load_config(overrides=stated)


def of_a_megatron_store(folder: Path) -> Config:
    path = write_megatron(folder / "web", some_documents(60))
    stated = (f"max_target_length={LENGTH}", "vocab_size=300")
    return load_config(overrides=["dataset_type=megatron", f"dataset_path={path}", *stated])


def with_holes(config: Config, text: str = SPEC) -> Stream:
    stream = open_stream(config.replaced({"skip_samples": text}))
    assert stream is not None
    return stream


def kept(text: str = SPEC, end: int = 90) -> list[int]:
    ranges = [tuple(map(int, word.split(":"))) for word in text.split()]
    return [own for own in range(end) if not any(a <= own < b for a, b in ranges)]


@pytest.mark.parametrize(
    "made",
    [
        of_texts,
        of_a_mixture,
        of_conversations,
        of_pairs,
        of_a_prepared_store,
        of_a_megatron_store,
    ],
)
def test_what_is_left_is_the_list_without_the_samples_of_holes(
    made: Callable[[Path], Config], tmp_path: Path
) -> None:
    config = made(tmp_path)
    whole, left, own_numbers = open_stream(config), with_holes(config), kept()
    count = len(own_numbers)
    assert same(left.read(0, count), whole.batch(own_numbers))
    assert same(left[4], whole[own_numbers[4]])
    assert fingerprint([left.read(2, 30)]) == fingerprint([whole.batch(own_numbers[2:30])])
    assert [left.row(n) for n in range(count)] == [whole.row(own) for own in own_numbers]
    assert left.identity != whole.identity == with_holes(config, "").identity
    by_source = [left.samples_by_source(n) for n in (0, 1, 20, count, 8)]
    for position, counts in zip((0, 1, 20, count, 8), by_source, strict=True):
        if counts is not None:
            trained = Counter(whole.row(own).source for own in own_numbers[:position])
            assert counts == {source: trained[source] for source in counts}
    assert (by_source[0] is None) == (made is not of_a_mixture)


def test_holes_at_any_place_leave_the_list(tmp_path: Path) -> None:
    """Over an epoch's end, a whole epoch, all but one sample, and a thousand holes."""
    config = of_texts(tmp_path)
    whole = open_stream(config)
    n = whole.samples_per_epoch
    thousand = " ".join(f"{3 * i}:{3 * i + 1 + i % 2}" for i in range(1000))
    for text in (f"{n - 4}:{n + 3}", f"{n}:{2 * n}", f"0:{n - 1} {n}:{2 * n}", thousand):
        own_numbers, left = kept(text, 3 * n), with_holes(config, text)
        assert same(left.read(0, len(own_numbers)), whole.batch(own_numbers))


def test_readers_and_what_their_workers_are_given_read_what_is_left() -> None:
    config = synthetic_config("synthetic_samples=50")
    whole, left = open_stream(config), pickle.loads(pickle.dumps(with_holes(config)))
    rows = list(rows_of(left, Contiguous(10, 40)))
    assert all(map(same, rows, (whole[own] for own in kept()[10:40])))


def test_held_out_rows_are_untouched_by_holes(tmp_path: Path) -> None:
    config = of_texts(tmp_path).replaced({"eval_fraction": 0.2})
    whole = open_stream(config, "eval")
    held_out = open_stream(config.replaced({"skip_samples": "0:1000"}), "eval")
    assert held_out.identity == whole.identity
    assert same(held_out.read(0, len(whole)), whole.read(0, len(whole)))


def test_a_stream_of_ones_own_has_the_holes_of_the_config(tmp_path: Path) -> None:
    rows = [np.full(LENGTH, n, np.int32) for n in range(20)]
    config = synthetic_config(f"skip_samples={SPEC}").stream
    left = as_stream(rows, config)
    assert left.read(0, 30)["tokens"][:, 0].tolist() == [own % 20 for own in kept()[:30]]
    opened = open_stream(config)
    assert as_stream(opened, config) is opened
    without = open_stream(synthetic_config())
    assert same(as_stream(without, config).read(0, 50), opened.read(0, 50))
    with pytest.raises(ConfigError, match=r"works: skip_samples=.3:5 17:40 60:61."):
        as_stream(opened, synthetic_config("skip_samples=3:6").stream)


def test_a_stream_without_holes_asks_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It executes what it executed before there were holes."""
    asked: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., object]:
        method = getattr(Holes, name)

        def counted(self: Holes, *arguments: object) -> object:
            asked[name] += 1
            return method(self, *arguments)

        return counted

    for name in ("own_number", "own_numbers", "kept_before", "position_after", "__contains__"):
        monkeypatch.setattr(Holes, name, counting(name))
    stream = open_stream(synthetic_config())
    given: list[object] = []
    batch = stream.samples.batch
    monkeypatch.setattr(
        stream.samples, "batch", lambda indices: given.append(indices) or batch(indices)
    )
    indices = range(5, 50)
    stream.batch(indices)
    assert given == [indices] and given[0] is indices and stream.holes is NO_HOLES
    list(rows_of(stream, Contiguous(0, 300)))
    assert not asked
    dataclasses.replace(stream, holes=Holes([(1, 2)])).batch(indices)
    assert asked["own_numbers"] == 1
