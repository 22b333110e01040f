from __future__ import annotations

import json
import os
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.stream.reader import Contiguous
from maxbatch.data.stream.sources import samples_per_epoch_if_cached
from maxbatch.data.stream.stream import Stream, open_stream
from tests.helpers.corpus import LENGTH, mixture_config, same, some_texts, write_jsonl

SIZES = {"web": 120, "code": 45, "books": 9}


def texts(name: str) -> list[str]:
    """Texts of a source, which show where they come from."""
    return [f"{name[0]}{text}" for text in some_texts(SIZES[name])]


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> Path:
    """web.jsonl, code.jsonl and books.jsonl in the present folder."""
    for name in SIZES:
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts(name)])
    return tmp_path


def opened(mixture: str, *overrides: str, split: str = "train") -> Stream:
    stream = open_stream(mixture_config(mixture, *overrides), split)
    assert stream is not None
    return stream


LINE = "web.jsonl,0.6;code.jsonl,0.3;books.jsonl,0.1"


def mixture_file(folder: Path, text: str, name: str = "mix.yml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


FILE = """
web: {path: web.jsonl, weight: 0.6}
code:
  path: code.jsonl
  weight: 0.3
books: {path: books.jsonl, weight: 0.1}
"""


def parts(mixture: str, *overrides: str) -> list[tuple[str, Fraction, str]]:
    sources = read_mixture(mixture_config(mixture, *overrides).stream)
    assert sources is not None
    return [(source.name, source.weight, source.config.dataset_path) for source in sources]


@pytest.mark.parametrize(
    "weights", ["0.6 0.3 0.1", "6 3 1", "6e2 3e2 100", "3/5 3/10 1/10", ".6 0.30 1e-1"]
)
def test_weights_are_exact_and_their_ratios_count(weights: str) -> None:
    line = ";".join(f"{name}.jsonl,{w}" for name, w in zip(SIZES, weights.split(), strict=True))
    assert parts(line) == [
        ("web.jsonl", Fraction(3, 5), "web.jsonl"),
        ("code.jsonl", Fraction(3, 10), "code.jsonl"),
        ("books.jsonl", Fraction(1, 10), "books.jsonl"),
    ]


def test_a_list_in_a_config_file_is_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(
        "dataset_type: jsonl\ndataset_path:\n  - {path: web.jsonl, weight: 0.75}\n"
        "  - {path: code.jsonl, weight: 0.25}\n"
    )
    sources = read_mixture(load_config(tmp_path / "run.yml").stream)
    assert sources and [(s.name, s.weight) for s in sources] == [
        ("web.jsonl", Fraction(3, 4)),
        ("code.jsonl", Fraction(1, 4)),
    ]


@pytest.mark.parametrize(
    "path", ["", "web.jsonl", "web.jsonl;code.jsonl", "*.json", "a,b.jsonl", "x,nan"]
)
def test_paths_without_weights_are_no_mixture(path: str) -> None:
    assert read_mixture(mixture_config(path).stream) is None


@pytest.mark.parametrize("name", ["mix.yml", "mix.yaml", "mix.json"])
def test_a_mixture_file_gives_names_and_its_paths_are_relative_to_it(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "below").mkdir()
    sources = {
        "web": {"path": "../web.jsonl", "weight": 0.1},
        "code": {
            "path": "x.parquet;y/*.parquet",
            "weight": 0.2,
            "dataset_type": "parquet",
            "text_field": "c",
        },
        "all": {
            "path": "/data/z",
            "weight": 7,
            "dataset_type": "arrayrecord",
            "record_format": "example",
        },
        "remote": {"path": "gs://bucket/z", "weight": 1},
        "python": {"weight": 1, "dataset_type": "python_stdlib"},
    }
    text = json.dumps(sources, indent="\t") if name.endswith("json") else json.dumps(sources)
    mixture = read_mixture(mixture_config(mixture_file(tmp_path / "below", text, name)).stream)
    assert mixture is not None and [source.name for source in mixture] == list(sources)
    below = tmp_path / "below"
    assert [source.config.dataset_path for source in mixture] == [
        f"{below}/../web.jsonl",
        f"{below}/x.parquet;{below}/y/*.parquet",
        "/data/z",
        "gs://bucket/z",
        "",
    ]
    assert [s.config.dataset_type for s in mixture] == [
        "jsonl",
        "parquet",
        "arrayrecord",
        "jsonl",
        "python_stdlib",
    ]
    assert (mixture[1].config.text_field, mixture[2].config.record_format) == ("c", "example")
    assert [source.weight for source in mixture] == [Fraction(n, 93) for n in (1, 2, 70, 10, 10)]


@pytest.mark.parametrize("path", ["fifo.yml", "zero.yml"])
def test_a_mixture_file_that_is_no_regular_file_is_one_line(path: str) -> None:
    os.mkfifo("fifo.yml")
    os.symlink("/dev/zero", "zero.yml")
    with pytest.raises(ConfigError, match=rf"dataset_path='{path}': .*must be a regular file"):
        read_mixture(mixture_config(path).stream)


@pytest.mark.parametrize("odd", ["a\0b", "a\ud800b"])
@pytest.mark.parametrize("pattern", ["{},1;c,1", "{}.yml", "mix.yml"])
def test_paths_that_no_file_system_can_hold_are_one_line(odd: str, pattern: str) -> None:
    Path("mix.yml").write_text(json.dumps({"a": {"path": odd, "weight": 1}}))
    with pytest.raises(ConfigError, match="must be UTF-8 text without NUL characters") as raised:
        read_mixture(mixture_config(pattern.format(odd)).stream)
    assert str(raised.value).isprintable()


def test_data_whose_name_is_that_of_a_mixture_file_are_read_by_a_glob(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.json", [{"text": "abc"}, {"text": "def"}])
    with pytest.raises(ConfigError, match=r"if it holds data: dataset_path='data.jso\[n\]'"):
        read_mixture(mixture_config("data.json").stream)
    assert opened("data.jso[n]").samples_per_epoch == 2


def source_of(tokens: np.ndarray) -> str:
    """The source that the first token of a document's first row shows (packing=false; bos comes
    before it).
    """
    return {ord(name[0]): name for name in SIZES}[int(tokens)]


@pytest.mark.runs
def test_every_window_of_1000_samples_has_the_weights(tmp_path: Path) -> None:
    long = "max_target_length=100"
    for stream in (opened(LINE, long), opened(mixture_file(tmp_path, FILE), long)):
        first = stream.read(0, 4000)["tokens"][:, 1]
        for name, share in zip(SIZES, (600, 300, 100), strict=True):
            before = np.concatenate([[0], np.cumsum(first == ord(name[0]))])
            windows = before[1000:] - before[:-1000]
            assert set(windows.tolist()) <= {share - 1, share, share + 1}


def test_samples_come_from_the_source_that_is_named(tmp_path: Path) -> None:
    stream = opened(mixture_file(tmp_path, FILE), "max_target_length=100")
    for index in (*range(50), 10**12):
        place = stream.row(index)
        assert source_of(stream[index]["tokens"][1]) == place.source
        before, after = stream.samples_by_source(index), stream.samples_by_source(index + 1)
        assert before and after
        assert {name: after[name] - before[name] for name in after} == {
            name: int(name == place.source) for name in after
        }


def test_samples_by_source_are_exact_and_cost_nothing() -> None:
    stream = opened("web.jsonl,2;code.jsonl,1")
    assert stream.samples_by_source(0) == {"web.jsonl": 0, "code.jsonl": 0}
    assert stream.samples_by_source(3 * 10**12) == {"web.jsonl": 2 * 10**12, "code.jsonl": 10**12}
    with pytest.raises(IndexError, match="-1"):
        stream.samples_by_source(-1)
    assert opened("web.jsonl").samples_by_source(5) is None


def test_each_source_goes_through_epochs_of_its_own() -> None:
    stream = opened(LINE)
    places = [stream.row(index) for index in range(2000)]
    for name in SIZES:
        own = [place for place in places if place.source == f"{name}.jsonl"]
        rows = opened(f"{name}.jsonl").samples_per_epoch
        assert rows is not None and len(own) > rows
        assert [place.epoch for place in own] == [number // rows for number in range(len(own))]
        for epoch in range(len(own) // rows):
            of_epoch = [place.row for place in own[epoch * rows : (epoch + 1) * rows]]
            assert sorted(of_epoch) == list(range(rows)) and of_epoch != list(range(rows))


def test_a_source_is_shuffled_by_its_content_not_by_its_neighbours_name_or_path(
    tmp_path: Path,
) -> None:
    def order(stream: Stream, source: str) -> list[int]:
        return [p.row for p in map(stream.row, range(1000)) if p.source == source][:40]

    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in SIZES:
        (moved / f"{name}.jsonl").write_bytes((tmp_path / f"{name}.jsonl").read_bytes())
    first = opened(mixture_file(tmp_path, FILE))
    there = opened(mixture_file(moved, FILE))
    other = opened(
        mixture_file(tmp_path, FILE.replace("books:", "novels:").replace("0.6", "0.5"), "other.yml")
    )
    assert order(first, "web") == order(there, "web") == order(other, "web")
    assert order(first, "books") == order(other, "novels")
    assert first.identity == there.identity
    assert same(first.read(0, 100), there.read(0, 100))


def test_two_sources_of_one_content_do_not_march_in_step(tmp_path: Path) -> None:
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "web.jsonl").read_bytes())
    stream = opened("web.jsonl,1;copy.jsonl,1")
    places = [stream.row(index) for index in range(100)]
    web, copy = (
        [p.row for p in places if p.source == f"{name}.jsonl"][:20] for name in ("web", "copy")
    )
    assert web != copy


def test_the_identity_knows_weights_order_and_contents_of_the_sources(tmp_path: Path) -> None:
    base = opened(mixture_file(tmp_path, FILE)).identity
    assert json.loads(json.dumps(base)) == base
    assert all(isinstance(value, str | int | bool) for value in base.values())
    assert base["source 0: weight"] == "3/5" and base["max_target_length"] == LENGTH
    same_ratios = FILE.replace("0.6", "6").replace("0.3", "3").replace("0.1", "1")
    assert opened(mixture_file(tmp_path, same_ratios)).identity == base

    def differing(text: str, *overrides: str) -> set[str]:
        other = opened(mixture_file(tmp_path, text), *overrides).identity
        return {key for key in base.keys() | other.keys() if base.get(key) != other.get(key)}

    reordered = FILE.replace("books: {path: books.jsonl, weight: 0.1}", "")
    reordered = "books: {path: books.jsonl, weight: 0.1}\n" + reordered
    assert "source 0: content" in differing(reordered)
    other_weights = FILE.replace("0.3", "0.2").replace("0.1", "0.2")
    assert differing(other_weights) == {"source 1: weight", "source 2: weight"}
    assert not differing(FILE.replace("books:", "novels:"))
    assert differing(FILE, "max_target_length=20") == {"max_target_length"}
    assert differing(FILE, "data_shuffle_seed=1") == {"data_shuffle_seed"}
    assert differing(FILE, "packing=true", "packing_strategy=best_fit") == {
        "packing",
        "packing_strategy",
    }
    write_jsonl(tmp_path / "code.jsonl", [{"text": "other"}])
    assert differing(FILE) == {"source 1: content"}


@pytest.mark.parametrize("packing", ["packing=false", "packing=true", "packing_strategy=best_fit"])
def test_any_way_of_asking_gives_the_same_samples(packing: str) -> None:
    stream = opened(LINE, "packing=true", packing)
    start, stop = 10**12 + 890, 10**12 + 1150
    block = stream.read(start, stop)
    for place in (0, 109, 110, 111, 259):
        assert same(stream[start + place], {name: array[place] for name, array in block.items()})
    with stream.reader_of(Contiguous(start, stop)) as reader:
        assert same(reader.take(260), block)
    mixed = np.random.default_rng(0).permutation(260)
    assert same(stream.batch(start + mixed), {name: array[mixed] for name, array in block.items()})
    assert {name: array.shape for name, array in stream.batch([]).items()} == dict.fromkeys(
        block, (0, LENGTH)
    )


def test_worker_processes_give_the_same_samples() -> None:
    stream = opened(LINE, "grain_worker_count=2", "packing=true", "packing_strategy=best_fit")
    with stream.reader_of(Contiguous(990, 1100)) as reader:
        assert same(reader.take(110), stream.read(990, 1100))


def test_an_index_below_zero_is_refused() -> None:
    with pytest.raises(IndexError, match="-1"):
        opened(LINE)[-1]


@pytest.mark.parametrize("packing", ["packing=true", "packing_strategy=best_fit"])
def test_stats_count_each_source_once_and_their_sum(packing: str) -> None:
    stats = opened(LINE, "packing=true", packing).stats()
    sources = stats["sources"]
    assert list(sources) == [f"{name}.jsonl" for name in SIZES]
    for name in SIZES:
        alone = opened(f"{name}.jsonl", "packing=true", packing).stats()
        assert sources[f"{name}.jsonl"] == alone | {"weight": sources[f"{name}.jsonl"]["weight"]}
    for figure in ("samples", "slots", "tokens", "documents"):
        assert stats[figure] == sum(source[figure] for source in sources.values())
    assert stats["packing_efficiency"] == stats["tokens"] / stats["slots"]
    assert [source["weight"] for source in sources.values()] == [0.6, 0.3, 0.1]


def test_the_held_out_part_of_each_source_comes_once_one_after_the_other() -> None:
    stream = opened(LINE, "eval_fraction=0.2", "max_target_length=100", split="eval")
    rows = [stream.row(index) for index in range(stream.samples_per_epoch or 0)]
    held_out = {f"{name}.jsonl": count // 5 for name, count in SIZES.items()}
    assert list(Counter(place.source for place in rows).items()) == list(held_out.items())
    assert [p.row for p in rows] == [row for count in held_out.values() for row in range(count)]
    assert stream.samples_by_source(25) == {"web.jsonl": 24, "code.jsonl": 1, "books.jsonl": 0}
    kept = Counter(row.tobytes() for row in stream.read(0, len(rows))["tokens"])
    seen = Counter(
        row.tobytes() for row in opened(LINE, "eval_fraction=0.2").read(0, 3000)["tokens"]
    )
    assert not kept.keys() & seen.keys()
    with pytest.raises(IndexError, match=f"0 to {len(rows) - 1}"):
        stream[len(rows)]
    assert open_stream(mixture_config(LINE), "eval") is None


def test_a_held_out_path_is_held_out_of_every_source(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    (tmp_path / "web.jsonl").rename(folder / "train.jsonl")
    (tmp_path / "books.jsonl").rename(folder / "val.jsonl")
    overrides = ["eval_dataset_path=all/val.jsonl", "max_target_length=100"]
    stats = opened("all,0.6;code.jsonl,0.4", *overrides).stats()
    assert {name: source["documents"] for name, source in stats["sources"].items()} == {
        "all": SIZES["web"],
        "code.jsonl": SIZES["code"],
    }
    held_out = opened("all,0.6;code.jsonl,0.4", *overrides, split="eval")
    assert held_out.samples_per_epoch == SIZES["books"]
    assert held_out.samples_by_source(3) is None and held_out.row(0).source is None


def test_epochs_of_a_mixture_are_refused_and_what_is_named_instead_works() -> None:
    config = mixture_config(LINE, "num_epochs=1.5")
    with pytest.raises(ConfigError, match=r"num_epochs of a mixture.*works: train_samples=1000000"):
        samples_per_epoch_if_cached(config.stream)
    stream = opened(LINE)
    assert (
        stream.samples_per_epoch is None
        and samples_per_epoch_if_cached(mixture_config(LINE).stream) is None
    )
    with pytest.raises(ConfigError, match=r"num_epochs=1\.5: num_epochs of a mixture") as raised:
        open_stream(config)
    works = str(raised.value).rpartition("works: ")[2]
    assert works == f"train_samples={-(-3 * stream.stats()['samples'] // 2)} num_epochs=null"
    assert open_stream(mixture_config(LINE, *works.split())) is not None


def test_a_source_that_cannot_be_opened_is_named() -> None:
    file = mixture_file(Path("."), FILE.replace("books.jsonl", "none.jsonl"))
    with pytest.raises(
        ConfigError, match=r"source books of the mixture: dataset_path='.*none.jsonl'"
    ):
        open_stream(mixture_config(file))


def test_sources_of_different_types_are_mixed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("notes")
    write_jsonl(tmp_path / "other.jsonl", [{"body": "other"}])
    file = mixture_file(
        tmp_path,
        "web: {path: web.jsonl, weight: 1}\nnotes: {path: notes, weight: 1, dataset_type: text}\n"
        "other: {path: other.jsonl, weight: 1, text_field: body}\n",
    )
    stream = opened(file)
    shown = {stream.row(i).source: stream.tokenizer.decode(stream[i]["tokens"]) for i in range(20)}
    assert "notes" in shown["notes"] and "other" in shown["other"]
