from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch import load_config
from maxbatch.config.config import Config
from maxbatch.data.stream import packing
from maxbatch.data.stream.packing import (
    BestFitPlan,
    Packing,
    best_fit,
    find_best_fit,
    open_best_fit,
)
from maxbatch.data.stream.rows import Extents
from maxbatch.system.errors import TrainingError

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def packed(lengths: list[int], row_length: int) -> Packing:
    return best_fit(
        Extents.of(np.concatenate([[0], np.cumsum(lengths)]), np.arange(len(lengths))), row_length
    )


def rows_of(packing: Packing) -> list[list[tuple[int, int]]]:
    """(start, length) of the pieces of each row."""
    bounds = packing.first_piece.tolist()
    pieces = list(zip(packing.start_P.tolist(), packing.length_P.tolist(), strict=True))
    return [pieces[a:b] for a, b in pairwise(bounds)]


def filled(packing: Packing) -> list[int]:
    return [sum(length for _, length in row) for row in rows_of(packing)]


def free_space_one_by_one(lengths: list[int], row_length: int) -> list[int]:
    """Best-fit decreasing as in the paper: every piece searches all rows."""
    pieces = [row_length] * sum(length // row_length for length in lengths)
    pieces += sorted(
        (length % row_length for length in lengths if length % row_length), reverse=True
    )
    rows: list[int] = []
    for piece in pieces:
        fitting = [row for row, free in enumerate(rows) if free >= piece]
        if fitting:
            rows[min(fitting, key=rows.__getitem__)] -= piece
        else:
            rows.append(row_length - piece)
    return sorted(rows)


@given(lengths=LENGTHS, row_length=st.integers(2, 40))
def test_groups_give_what_one_document_after_the_other_gives(lengths, row_length) -> None:
    free = sorted(row_length - tokens for tokens in filled(packed(lengths, row_length)))
    assert free == free_space_one_by_one(lengths, row_length)


@pytest.mark.parametrize("seed", range(5))
def test_groups_give_what_one_document_after_the_other_gives_of_many(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(3, 1.3, 1500)).astype(np.int64).tolist()
    free = sorted(64 - tokens for tokens in filled(packed(lengths, 64)))
    assert free == free_space_one_by_one(lengths, 64)


@given(lengths=LENGTHS, row_length=st.integers(2, 40), data=st.data())
def test_documents_are_cut_every_row_length_and_nowhere_else(lengths, row_length, data) -> None:
    documents = data.draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1).map(sorted))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    packing = best_fit(Extents.of(offsets, np.array(documents)), row_length)
    wanted = Counter()
    for document in documents:
        for begin in range(int(offsets[document]), int(offsets[document + 1]), row_length):
            wanted[begin, min(row_length, int(offsets[document + 1]) - begin)] += 1
    assert Counter(piece for row in rows_of(packing) for piece in row) == wanted
    assert all(0 < tokens <= row_length for tokens in filled(packing))


@pytest.mark.parametrize("sigma", [1.0, 1.25, 1.5])
def test_web_text_fills_97_percent_of_the_slots(sigma: float) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(500), sigma, 20_000).astype(np.int64) + 1
    packing = packed(lengths.tolist(), 2048)
    assert lengths.sum() / ((len(packing.first_piece) - 1) * 2048) >= 0.97


def test_fewer_documents_are_cut_than_by_cutting_the_joined_sequence() -> None:
    lengths = np.random.default_rng(0).integers(1, 2048, 5000)
    assert len(packed(lengths.tolist(), 2048).start_P) == 5000


def test_the_work_does_not_grow_with_the_number_of_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from maxbatch.data.stream import packing as module

    def group_operations(documents: int) -> int:
        calls = 0
        fill = module._Rows._fill

        def counted(*arguments):
            nonlocal calls
            calls += 1
            return fill(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module._Rows, "_fill", counted)
            packed(np.random.default_rng(0).integers(1, 3000, documents).tolist(), 512)
        return calls

    assert group_operations(200_000) <= 3 * 512
    assert group_operations(2000) <= 3 * 512


def test_neither_rows_nor_their_pieces_are_in_order_of_length() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64) + 1
    rows = rows_of(packed(lengths.tolist(), 512))
    longest = [max(length for _, length in row) for row in rows]
    number = [len(row) for row in rows]
    assert abs(np.corrcoef(np.arange(len(rows)), longest)[0, 1]) < 0.03
    assert abs(np.corrcoef(np.arange(len(rows)), number)[0, 1]) < 0.03
    places, sizes = [], []
    for row in rows:
        if len(row) > 1:
            places += np.linspace(0, 1, len(row)).tolist()
            sizes += [length for _, length in row]
    assert abs(np.corrcoef(places, sizes)[0, 1]) < 0.03
    assert all(row == sorted(row) for row in rows), "pieces stand as in the dataset"


def test_rows_stand_in_the_order_of_the_pieces_that_opened_them() -> None:
    assert rows_of(packed([4, 4, 4], 4)) == [[(0, 4)], [(4, 4)], [(8, 4)]]
    assert rows_of(packed([3, 9, 2], 4)) == [[(0, 3), (11, 1)], [(3, 4)], [(7, 4)], [(12, 2)]]


def config_in(folder: Path, *overrides: str):
    return load_config(overrides=[f"data_cache_dir={folder}", "max_target_length=8", *overrides])


def of(config: Config) -> tuple[str, int]:
    return config.data_cache_dir, config.max_target_length


def documents() -> Extents:
    lengths = np.random.default_rng(0).integers(1, 20, 50)
    return Extents.of(np.concatenate([[0], np.cumsum(lengths)]), np.arange(50))


def never() -> Extents:
    raise AssertionError("computed again")


def all_pieces(plan: BestFitPlan) -> list[list[int]]:
    return [array.tolist() for array in plan.pieces(np.arange(plan.num_rows))]


def test_a_plan_is_computed_once_and_read_by_row_afterwards(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert find_best_fit(*of(config), {"content": "a"}) is None
    plan = open_best_fit(*of(config), {"content": "a"}, documents)
    again = open_best_fit(*of(config), {"content": "a"}, never)
    packing = best_fit(documents(), 8)
    assert all_pieces(plan)[1:] == [packing.start_P.tolist(), packing.length_P.tolist()]
    assert all_pieces(again) == all_pieces(plan)
    assert again.num_tokens == documents().end_S[-1] and again.row_length == 8
    some = plan.pieces(np.array([3, 0, 3]))
    rows = rows_of(packing)
    wanted = [(place, *piece) for place, row in enumerate((3, 0, 3)) for piece in rows[row]]
    assert list(zip(*(array.tolist() for array in some), strict=True)) == wanted


def test_what_shapes_a_plan_is_in_its_key(tmp_path: Path) -> None:
    open_best_fit(*of(config_in(tmp_path)), {"content": "a"}, documents)
    assert find_best_fit(*of(config_in(tmp_path)), {"content": "b"}) is None
    assert find_best_fit(*of(config_in(tmp_path, "max_target_length=9")), {"content": "a"}) is None
    assert find_best_fit(*of(config_in(tmp_path / "other")), {"content": "a"}) is None
    assert find_best_fit(*of(config_in(tmp_path, "steps=3")), {"content": "a"}) is not None


def damaged(file: Path, how: str) -> None:
    whole = file.read_bytes()
    file.write_bytes(
        {
            "cut short": whole[:-3],
            "empty": b"",
            "another file": b"x" * len(whole),
            "of another version": whole.replace(b'"version": 2', b'"version": 0'),
            "a list": b"[]".ljust(len(whole)),
            "a text": b'"crc32"'.ljust(len(whole)),
            "a flipped bit": whole[:-1] + bytes([whole[-1] ^ 1]),
            "a flipped bit of the header": whole.replace(b'"rows": ', b'"rows": 1'),
            "zeros": whole[:4096] + bytes(len(whole) - 4096),
        }[how]
    )


DAMAGES = [
    "cut short",
    "empty",
    "another file",
    "of another version",
    "a list",
    "a text",
    "a flipped bit",
    "a flipped bit of the header",
    "zeros",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_plan_is_made_again(tmp_path: Path, how: str) -> None:
    config = config_in(tmp_path)
    whole = all_pieces(open_best_fit(*of(config), {}, documents))
    (file,) = (tmp_path / "packing").iterdir()
    damaged(file, how)
    assert find_best_fit(*of(config), {}) is None
    assert all_pieces(open_best_fit(*of(config), {}, documents)) == whole


def test_a_plan_that_is_not_finished_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    config = config_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(
            TrainingError, match=r"data_cache_dir=.*packing: no space left"
        ) as raised:
            open_best_fit(*of(config), {}, documents)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "packing").iterdir()) == []
    open_best_fit(*of(config), {}, documents)


def test_a_pickled_plan_carries_no_arrays(tmp_path: Path) -> None:
    plan = open_best_fit(*of(config_in(tmp_path)), {}, documents)
    whole = all_pieces(plan)
    pickled = pickle.dumps(plan)
    assert len(pickled) < 1000
    assert all_pieces(pickle.loads(pickled)) == whole


@pytest.mark.parametrize(
    "fields", [{"rows": 10**15}, {"pieces": -5}, {"rows": "1"}, {"rows": 10**15, "pieces": -1}]
)
def test_a_header_that_states_another_size_than_the_file_has_is_damaged(
    tmp_path: Path, fields: dict
) -> None:
    config = config_in(tmp_path)
    open_best_fit(*of(config), {}, documents)
    (file,) = (tmp_path / "packing").iterdir()
    whole = file.read_bytes()
    header = json.loads(whole[:4096])
    del header["crc32"]
    header |= fields
    header["crc32"] = packing._checksum(header, [whole[4096:]])
    file.write_bytes(json.dumps(header).encode().ljust(4096) + whole[4096:])
    assert find_best_fit(*of(config), {}) is None
