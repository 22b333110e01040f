"""Mixtures by stages: positions exact, each source in its own order, any index alike."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch import ConfigError, load_config
from maxbatch.config.loading import dump_config
from maxbatch.data.stream.mixture import read_mixture
from maxbatch.data.stream.mixture_order import MixtureStage, StagedOrder, WeightedOrder
from maxbatch.data.stream.stream import open_stream
from tests.helpers.corpus import LENGTH, mixture_config, same, some_texts, write_jsonl

BIG = 10**15


def stages_of(lengths: list[int], shares: list[list[int]]) -> list[MixtureStage]:
    starts = np.cumsum([0, *lengths])[: len(shares)].tolist()
    return [
        MixtureStage(start, tuple(Fraction(share, sum(own)) for share in own))
        for start, own in zip(starts, shares, strict=True)
    ]


@st.composite
def stages(draw: st.DrawFn) -> list[MixtureStage]:
    sources, number = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    lengths = draw(
        st.lists(
            st.one_of(st.integers(1, 2500), st.just(BIG)), min_size=number - 1, max_size=number - 1
        )
    )
    share = st.lists(st.integers(0, 30), min_size=sources, max_size=sources).filter(any)
    return stages_of(lengths, draw(st.lists(share, min_size=number, max_size=number)))


@pytest.mark.runs
@settings(max_examples=200)
@given(stages=stages(), data=st.data())
def test_each_source_goes_on_in_its_own_order_from_stage_to_stage(
    stages: list[MixtureStage], data: st.DataObject
) -> None:
    """Around every change: the next sample of a source is the one after its last, and the weights
    are the stage's.
    """
    order = StagedOrder(stages)
    start = data.draw(st.sampled_from([stage.start for stage in stages]))
    first = max(0, start - 1200)
    source_n, place_n = order.at(range(first, first + 3000))
    for source, before in enumerate(order.counts(first)):
        places = place_n[source_n == source]
        assert places.tolist() == list(range(before, before + len(places)))
    assert order.counts(first + 3000) == [
        before + int((source_n == source).sum())
        for source, before in enumerate(order.counts(first))
    ]
    for index, source in zip(range(first, first + 3000), source_n.tolist(), strict=True):
        stage = max(
            (stage for stage in stages if stage.start <= index), key=lambda stage: stage.start
        )
        assert stage.weights[source] > 0


@settings(max_examples=100)
@given(stages=stages(), index=st.integers(0, 3 * BIG))
def test_any_index_is_found_alone(stages: list[MixtureStage], index: int) -> None:
    order = StagedOrder(stages)
    (source,), (place,) = (array.tolist() for array in order.at([index]))
    before, after = order.counts(index), order.counts(index + 1)
    assert sum(before) == index and place == before[source]
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        int(k == source) for k in range(len(before))
    ]
    (again,), (there,) = pickle.loads(pickle.dumps(order)).at([index])
    assert (again, there) == (source, place)


@given(shares=st.lists(st.integers(1, 30), min_size=1, max_size=5), first=st.integers(0, BIG))
def test_one_stage_is_the_mixture_without_stages(shares: list[int], first: int) -> None:
    (stage,) = stages_of([], [shares])
    indices = range(first, first + 50)
    for staged, plain in zip(
        StagedOrder([stage]).at(indices), WeightedOrder(stage.weights).at(indices), strict=True
    ):
        assert (staged == plain).all()


STAGED = (
    "{0: {web.jsonl: .9, code.jsonl: .1}, 500: {web.jsonl: .5, code.jsonl: .5}, 64Kt: "
    "{books.jsonl: 1}}"
)


@pytest.fixture
def data(tmp_path: Path) -> None:
    for name, size in {"web": 120, "code": 45, "books": 9}.items():
        texts = [f"{name[0]}{text}" for text in some_texts(size)]
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])


@pytest.mark.usefixtures("data")
def test_a_stream_changes_its_mixture_exactly_at_the_position() -> None:
    stream = open_stream(mixture_config(STAGED))
    last = -(-64_000 // LENGTH)
    assert stream.samples_by_source(500) == {"web.jsonl": 450, "code.jsonl": 50, "books.jsonl": 0}
    assert stream.samples_by_source(1500) == {"web.jsonl": 950, "code.jsonl": 550, "books.jsonl": 0}
    assert {stream.row(i).source for i in range(last - 200, last)} == {"web.jsonl", "code.jsonl"}
    assert {stream.row(i).source for i in range(last, last + 200)} == {"books.jsonl"}
    first_stage = open_stream(mixture_config("web.jsonl,.9;code.jsonl,.1"))
    assert same(stream.read(0, 500), first_stage.read(0, 500)), "what is behind stays as it was"


@pytest.mark.usefixtures("data")
def test_the_positions_and_weights_are_part_of_the_identity() -> None:
    identities = [
        open_stream(mixture_config(STAGED.replace(*change))).identity
        for change in (
            ("", ""),
            ("500", "501"),
            (".5, code.jsonl: .5", ".6, code.jsonl: .4"),
            ("500", "0.5K"),
        )
    ]
    assert (
        identities[0] != identities[1]
        and identities[0] != identities[2]
        and identities[0] == identities[3]
    )


@pytest.mark.usefixtures("data")
def test_a_mapping_in_a_config_file_is_the_mapping_in_braces(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(
        f"dataset_type: jsonl\npacking: false\nmax_target_length: {LENGTH}\ndataset_path:\n  0: "
        "{web.jsonl: .9, code.jsonl: .1}\n  500: {web.jsonl: .5, code.jsonl: .5}\n  64Kt: "
        "books.jsonl\n"
    )
    config = load_config(tmp_path / "run.yml")
    assert open_stream(config).identity == open_stream(mixture_config(STAGED)).identity
    (tmp_path / "again.yml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yml") == config


@pytest.mark.usefixtures("data")
def test_a_mixture_file_may_state_weights_by_position(tmp_path: Path) -> None:
    (tmp_path / "mix.yml").write_text(
        "web: {path: web.jsonl, weight: {0: .9, 500: .5, 64Kt: 0}}\n"
        "code: {path: code.jsonl, weight: {0: .1, 500: .5, 64Kt: 0}}\n"
        "books: {path: books.jsonl, weight: {0: 0, 64Kt: 1}}\n"
    )
    assert (
        open_stream(mixture_config("mix.yml")).identity
        == open_stream(mixture_config(STAGED)).identity
    )


def test_a_mixture_in_one_line_has_a_bound_on_its_length_and_on_its_weights() -> None:
    long = "{0: {'" + "a" * 2_000_000 + ".jsonl': 1}}"
    wide = "{" + ", ".join(f"{i}: {i}.jsonl" for i in range(4000)) + "}"
    config = load_config(overrides=["dataset_type=jsonl"]).stream
    for text, said in (
        (long, "is larger than 1 MB"),
        (wide, "weights of 4,000 sources at 4,000 positions"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            read_mixture(config.replaced({"dataset_path": text}))
        assert len(str(refused.value)) < 1000
