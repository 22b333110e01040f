from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.data.stream.epochs import epoch_key
from maxbatch.data.stream.reader import Contiguous, RowBlocks
from maxbatch.data.stream.sources import samples_per_epoch_if_cached
from maxbatch.data.stream.stream import Stream, open_stream
from tests.helpers.corpus import (
    LENGTH,
    jsonl_config,
    row_by_row,
    rows_of,
    same,
    some_texts,
    synthetic_config,
)

TEXTS = some_texts(150)


def opened(config, split: str = "train") -> Stream:
    stream = open_stream(config, split)
    assert stream is not None
    return stream


def ids(stream: Stream, start: int, stop: int) -> list[bytes]:
    """What tells samples apart: their tokens."""
    return [row.tobytes() for row in stream.read(start, stop)["tokens"]]


def documents_of(stream: Stream) -> list[str]:
    """The documents of an unshuffled stream's first epoch, put together from its rows."""
    rows = stream.read(0, stream.samples_per_epoch)
    tokens = rows["tokens"][rows["segments"] > 0].tolist()
    starts = [place for place, token in enumerate(tokens) if token == stream.tokenizer.bos_id]
    return [stream.tokenizer.decode(tokens[a:b]) for a, b in pairwise([*starts, len(tokens)])]


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return opened(jsonl_config(tmp_path / "a.jsonl", TEXTS))


def test_the_length_of_a_stream_is_its_epoch_and_its_weights_are_those_of_predicted_tokens(
    stream: Stream,
) -> None:
    assert len(stream) == stream.samples_per_epoch
    row = stream[0]
    begins = np.diff(row["segments"], prepend=0) != 0
    assert (row["weights"] == ((row["segments"] > 0) & ~begins)).all()


PACKINGS = ["packing=true", "packing=false", "packing_strategy=best_fit"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_epoch_holds_every_row_once_in_another_order(tmp_path: Path, packing: str) -> None:
    stream = opened(jsonl_config(tmp_path / "a.jsonl", TEXTS, packing))
    unshuffled = jsonl_config(tmp_path / "a.jsonl", None, packing, "enable_data_shuffling=false")
    n = stream.samples_per_epoch
    epochs = [ids(stream, epoch * n, (epoch + 1) * n) for epoch in range(3)]
    in_order = ids(opened(unshuffled), 0, n)
    assert [sorted(epoch) for epoch in epochs] == [sorted(in_order)] * 3
    assert len({tuple(epoch) for epoch in (*epochs, in_order)}) == 4


def test_seed_and_epoch_are_not_added(tmp_path: Path) -> None:
    orders = {}
    for seed in (0, 1, 2):
        stream = opened(jsonl_config(tmp_path / "a.jsonl", TEXTS, f"data_shuffle_seed={seed}"))
        n = stream.samples_per_epoch
        orders.update(
            {(seed, epoch): tuple(ids(stream, epoch * n, (epoch + 1) * n)) for epoch in (0, 1, 2)}
        )
    assert len(set(orders.values())) == 9


def test_sources_of_one_seed_and_size_are_not_in_step() -> None:
    assert epoch_key(0, "text", 0) != epoch_key(0, "jsonl", 0)


def test_unshuffled_samples_are_the_rows_in_order_epoch_after_epoch(tmp_path: Path) -> None:
    stream = opened(jsonl_config(tmp_path / "a.jsonl", TEXTS, "enable_data_shuffling=false"))
    n = stream.samples_per_epoch
    assert documents_of(stream) == TEXTS
    assert ids(stream, 0, n) == ids(stream, 7 * n, 8 * n)


def test_best_fit_cuts_no_document_that_fits_into_a_row(tmp_path: Path) -> None:
    overrides = ["packing_strategy=best_fit", "enable_data_shuffling=false", "max_target_length=64"]
    stream = opened(jsonl_config(tmp_path / "a.jsonl", TEXTS, *overrides))
    rows = stream.read(0, stream.samples_per_epoch)
    documents = []
    for tokens, segments, weights in zip(*(rows[name] for name in rows), strict=True):
        for segment in range(1, segments.max() + 1):
            document = tokens[segments == segment]
            assert (document[0], document[-1]) == (stream.tokenizer.bos_id, stream.tokenizer.eos_id)
            assert weights[segments == segment].tolist() == [0] + [1] * (len(document) - 1)
            documents.append(stream.tokenizer.decode(document[1:-1]))
    assert Counter(documents) == Counter(TEXTS)
    assert stream.stats()["tokens"] == sum(len(text.encode()) + 2 for text in TEXTS)
    assert stream.stats()["packing_efficiency"] > 0.97


@pytest.mark.parametrize("packing", PACKINGS)
def test_documents_without_a_token_are_refused(tmp_path: Path, monkeypatch, packing: str) -> None:
    def no_tokens(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.zeros(0, np.int32) for _ in texts]

    monkeypatch.setattr(
        "maxbatch.data.tokenizers.tokenizers.ByteTokenizer.encode_utf8_batch", no_tokens
    )
    config = jsonl_config(tmp_path / "a.jsonl", ["\x00"], packing, "add_bos=false", "add_eos=false")
    with pytest.raises(
        ConfigError,
        match="none of the 1 documents has a token of the tokenizer; works: add_eos=true",
    ):
        opened(config)
    assert (
        opened(jsonl_config(tmp_path / "a.jsonl", None, packing, "add_eos=true")).samples_per_epoch
        == 1
    )


def test_best_fit_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jsonl_config(
        tmp_path / "a.jsonl", TEXTS, "packing_strategy=best_fit", f"data_cache_dir={tmp_path}/c"
    )
    first = opened(config)
    monkeypatch.setattr("maxbatch.data.stream.packing.best_fit", None)
    assert same(opened(config).read(0, 50), first.read(0, 50))
    held_out = jsonl_config(
        tmp_path / "a.jsonl", None, "packing_strategy=best_fit", "eval_fraction=0.5"
    )
    with pytest.raises(TypeError):
        opened(held_out)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_no_token_of_any_document_is_lost(tmp_path: Path, packing: str) -> None:
    texts = ["x" * 500, "", *TEXTS, "ż" * 33]
    overrides = [f"packing={packing}", "enable_data_shuffling=false"]
    assert documents_of(opened(jsonl_config(tmp_path / "a.jsonl", texts, *overrides))) == [
        t for t in texts if t
    ]


def test_any_way_of_asking_gives_the_same_samples(stream: Stream) -> None:
    start, stop = 13, 13 + 2 * stream.samples_per_epoch
    one_by_one = [stream[index] for index in range(start, stop)]
    block = stream.read(start, stop)
    dataset = row_by_row(stream, Contiguous(start, stop))
    assert len(dataset) == stop - start
    rows = rows_of(stream, Contiguous(start, stop))
    for place, (sample, row) in enumerate(zip(one_by_one, rows, strict=True)):
        assert same(sample, {name: array[place] for name, array in block.items()})
        assert same(sample, row)
        assert same(sample, dataset[place])
    backwards = stream.batch(range(stop - 1, start - 1, -1))
    assert same({name: array[::-1] for name, array in backwards.items()}, block)


def test_samples_have_the_shapes_and_types_that_training_takes(stream: Stream) -> None:
    sample = stream[0]
    assert {name: (array.shape, array.dtype.name) for name, array in sample.items()} == {
        "tokens": ((LENGTH,), "int32"),
        "segments": ((LENGTH,), "int32"),
        "weights": ((LENGTH,), "float32"),
    }
    assert sample["weights"][0] == 0


@pytest.mark.parametrize("kind", ["in order", "shuffled", "mixture"])
def test_far_samples_cost_what_near_ones_cost(tmp_path: Path, kind: str) -> None:
    if kind == "mixture":
        jsonl_config(tmp_path / "b.jsonl", TEXTS[:30])
        stream = opened(
            jsonl_config(
                tmp_path / "a.jsonl", TEXTS, "dataset_path=a.jsonl,0.123457;b.jsonl,0.876543"
            )
        )
    elif kind == "shuffled":
        stream = opened(synthetic_config("synthetic_samples=4B"))
    else:
        stream = opened(synthetic_config("synthetic_samples=10B", "enable_data_shuffling=false"))
    stream[0]

    def peak(index: int) -> int:
        tracemalloc.start()
        sample = stream[index]
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sample["tokens"].shape == (LENGTH,)
        return size

    # Of a mixture, what a block of 1000 samples needs is kept: sample 1000 needs a block that is
    # not there yet.
    assert max(map(peak, (10**9, 10**12, 10**18, 10**30))) < 2 * peak(1000) + 4096


@pytest.mark.parametrize("kind", ["synthetic", "mixture"])
def test_a_resume_far_into_the_stream_costs_what_its_start_costs(tmp_path: Path, kind: str) -> None:
    if kind == "mixture":
        jsonl_config(tmp_path / "b.jsonl", TEXTS[:30])
        stream = opened(
            jsonl_config(tmp_path / "a.jsonl", TEXTS, "dataset_path=a.jsonl,0.3;b.jsonl,0.7")
        )
    else:
        stream = opened(synthetic_config("synthetic_samples=4B"))
    calls = 0

    def events_of_reading(start: int) -> int:
        """Python function calls and returns, of native functions too: a measure of work without a
        clock.
        """
        nonlocal calls
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            block = RowBlocks(stream.batch, Contiguous(start, start + 64), 16)[2]
        finally:
            sys.setprofile(None)
        assert len(block["tokens"]) == 16
        return calls

    events_of_reading(5)
    near = events_of_reading(1000)
    assert max(map(events_of_reading, (10**9, 10**12, 2**62 - 1000))) <= 2 * near


def test_far_samples_of_a_shuffled_stream_are_found(stream: Stream) -> None:
    n = stream.samples_per_epoch
    epoch = 10**9
    assert sorted(ids(stream, epoch * n, (epoch + 1) * n)) == sorted(ids(stream, 0, n))
    with stream.reader_of(Contiguous(epoch * n + 3, 1 << 62)) as reader:
        assert same(reader.take(5), stream.read(epoch * n + 3, epoch * n + 8))


@pytest.mark.parametrize("index", [-1, -(10**12)])
def test_there_is_nothing_before_the_start(stream: Stream, index: int) -> None:
    with pytest.raises(IndexError, match=str(index)):
        stream[index]
    with pytest.raises(IndexError):
        stream.reader_of(Contiguous(index, 1 << 62))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.37])
def test_held_out_documents_are_no_part_of_the_stream(tmp_path: Path, fraction: float) -> None:
    overrides = [f"eval_fraction={fraction}", "enable_data_shuffling=false"]
    config = jsonl_config(tmp_path / "a.jsonl", TEXTS, *overrides)
    train, held_out = documents_of(opened(config)), documents_of(opened(config, "eval"))
    assert not set(train) & set(held_out)
    assert Counter(train + held_out) == Counter(TEXTS)
    assert len(held_out) == int(len(TEXTS) * fraction)


def test_held_out_samples_come_once_and_in_order(tmp_path: Path) -> None:
    stream = opened(jsonl_config(tmp_path / "a.jsonl", TEXTS, "eval_fraction=0.2"), "eval")
    n = stream.samples_per_epoch
    assert documents_of(stream) == TEXTS[4::5]
    assert [row["tokens"].tobytes() for row in rows_of(stream, Contiguous(0, n))] == ids(
        stream, 0, n
    )
    with pytest.raises(IndexError, match=f"0 to {n - 1}"):
        stream[n]


def test_a_held_out_path_is_read_whole_and_leaves_the_stream_alone(tmp_path: Path) -> None:
    other = ["apart", "from the rest"]
    jsonl_config(tmp_path / "b.jsonl", other)
    config = jsonl_config(tmp_path / "a.jsonl", TEXTS, f"eval_dataset_path={tmp_path / 'b.jsonl'}")
    assert documents_of(opened(config, "eval")) == other
    assert opened(config).identity == opened(jsonl_config(tmp_path / "a.jsonl")).identity


def test_a_file_below_both_paths_is_held_out_and_does_not_train() -> None:
    folder = Path("all")
    folder.mkdir()
    held_out = f"eval_dataset_path={folder / 'val.jsonl'}"
    jsonl_config(folder / "val.jsonl", ["apart", "from the rest"])
    jsonl_config(folder / "train.jsonl", TEXTS)
    config = jsonl_config(folder, None, held_out)
    assert documents_of(opened(config, "eval")) == ["apart", "from the rest"]
    assert opened(config).identity == opened(jsonl_config(folder / "train.jsonl")).identity
    with pytest.raises(ConfigError, match=r"eval_dataset_path='.*val.jsonl': holds out every file"):
        open_stream(jsonl_config(folder / "val.jsonl", None, held_out))


def test_without_held_out_data_there_is_no_eval_stream(tmp_path: Path) -> None:
    assert open_stream(jsonl_config(tmp_path / "a.jsonl", TEXTS), "eval") is None
    assert open_stream(synthetic_config(), "eval") is None


def test_the_standard_library_trains_without_its_held_out_files() -> None:
    config = load_config(overrides=["enable_data_shuffling=false"])
    train, held_out = documents_of(opened(config)), documents_of(opened(config, "eval"))
    assert len(held_out) == 12 and len(train) > 300
    assert not set(train) & set(held_out)
    by_share = load_config(overrides=["enable_data_shuffling=false", "eval_fraction=0.01"])
    assert len(documents_of(opened(by_share, "eval"))) == (len(train) + 12) // 100


def test_identity_does_not_know_where_and_when(tmp_path: Path) -> None:
    first = jsonl_config(tmp_path / "a.jsonl", TEXTS)
    moved = jsonl_config(
        tmp_path / "b.jsonl",
        TEXTS,
        f"data_cache_dir={tmp_path}/c",
        "grain_worker_count=3",
        "run_dir=elsewhere",
        "per_device_batch_size=3",
        "grain_prefetch_buffer_size=7",
    )
    assert opened(first).identity == opened(moved).identity
    assert same(opened(first)[5], opened(moved)[5])


@pytest.mark.parametrize(
    "override",
    [
        "max_target_length=17",
        "packing=false",
        "packing_strategy=best_fit",
        "add_bos=false",
        "add_eos=false",
        "enable_data_shuffling=false",
        "data_shuffle_seed=1",
        "eval_fraction=0.1",
        "skip_bad_records=true",
    ],
)
def test_identity_knows_every_setting_that_defines_the_stream(
    tmp_path: Path, override: str
) -> None:
    before = opened(jsonl_config(tmp_path / "a.jsonl", TEXTS)).identity
    after = opened(jsonl_config(tmp_path / "a.jsonl", TEXTS, override)).identity
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    key = override.partition("=")[0]
    assert {"eval_fraction": "held_out"}.get(key, key) in differing
    assert differing <= {key, "held_out", "data_shuffle_seed"}


def test_identity_knows_content_and_order(tmp_path: Path) -> None:
    identities = [
        opened(jsonl_config(tmp_path / "a.jsonl", texts)).identity
        for texts in (TEXTS, TEXTS[::-1], TEXTS[:-1])
    ]
    assert len({identity["content"] for identity in identities}) == 3
    assert json.loads(json.dumps(identities)) == identities


@pytest.mark.parametrize(
    "override",
    [
        "synthetic_samples=999",
        "data_shuffle_seed=1",
        "max_target_length=17",
        "vocab_size=100",
        "eval_fraction=0.1",
    ],
)
def test_a_synthetic_identity_knows_its_parameters(override: str) -> None:
    assert opened(synthetic_config()).identity != opened(synthetic_config(override)).identity


def test_an_unshuffled_streams_identity_ignores_the_seed(tmp_path: Path) -> None:
    configs = [
        jsonl_config(
            tmp_path / "a.jsonl", TEXTS, "enable_data_shuffling=false", f"data_shuffle_seed={seed}"
        )
        for seed in (0, 1)
    ]
    assert opened(configs[0]).identity == opened(configs[1]).identity


def test_stats_count_an_epoch(tmp_path: Path) -> None:
    texts = ["abc", "", "d" * 30]
    packed = opened(jsonl_config(tmp_path / "a.jsonl", texts)).stats()
    assert packed == {
        "samples": 3,
        "slots": 48,
        "tokens": 37,
        "packing_efficiency": 37 / 48,
        "documents": 2,
        "skipped_records": 1,
    }
    unpacked = opened(jsonl_config(tmp_path / "a.jsonl", texts, "packing=false")).stats()
    assert (unpacked["samples"], unpacked["tokens"]) == (3, 37)


@pytest.mark.parametrize("override", [*PACKINGS, "eval_fraction=0.2", "dataset_type=synthetic"])
def test_the_length_of_an_epoch_is_known_once_cached(tmp_path: Path, override: str) -> None:
    config = jsonl_config(tmp_path / "a.jsonl", TEXTS, override, f"data_cache_dir={tmp_path}")
    if "synthetic" in override:
        config = synthetic_config("eval_fraction=0.1")
    else:
        assert samples_per_epoch_if_cached(config.stream) is None
    assert opened(config).samples_per_epoch == samples_per_epoch_if_cached(config.stream)


def test_the_length_of_an_epoch_of_data_that_are_not_here_is_unknown() -> None:
    assert (
        samples_per_epoch_if_cached(
            load_config(overrides=["dataset_type=text", "dataset_path=/not/here"]).stream
        )
        is None
    )


def test_planning_loads_neither_jax_nor_grain(tmp_path: Path) -> None:
    code = (
        "import sys; from maxbatch import load_config;"
        "from maxbatch.data.stream.sources import samples_per_epoch_if_cached;"
        "from maxbatch.config.combined import StreamConfig;"
        "samples_per_epoch_if_cached(load_config().stream);"
        "print(sorted({'jax', 'grain', 'flax', 'optax', 'orbax', 'rich'} & set(sys.modules)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("records", [2, 3, 7, 11, 64, 999])
def test_the_share_that_a_refusal_suggests_works(records: int) -> None:
    with pytest.raises(ConfigError) as raised:
        open_stream(synthetic_config(f"synthetic_samples={records}", "eval_fraction=1e-6"))
    suggested = str(raised.value).rpartition("works: ")[2]
    assert (
        opened(
            synthetic_config(f"synthetic_samples={records}", suggested), "eval"
        ).samples_per_epoch
        == 1
    )


def test_the_most_rows_that_32_bits_can_permute_are_taken() -> None:
    stream = opened(synthetic_config("synthetic_samples=4294967296"))
    assert all(0 <= stream.row(index)[1] < 1 << 32 for index in ((1 << 32) - 1, 1 << 32, 10**15))
    assert np.unique([stream.row(index)[1] for index in range(2000)]).size == 2000
