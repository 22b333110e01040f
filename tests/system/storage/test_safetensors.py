"""safetensors: what the format's own library refuses is refused, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxbatch import ConfigError
from maxbatch.system.storage.safetensors import INDEX, stored_tensors


def tensor(first: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - first) // 4] if shape is None else shape,
        "data_offsets": [first, end],
    }


def written(path: Path, header: object, size: int, padding: bytes = b"") -> Path:
    """Writes a file of this header, whose tensors have `size` bytes 0, 1, 2, ..."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(size)))
    return path


@pytest.mark.parametrize(
    ("header", "size", "padding", "names"),
    [
        ({"a": tensor(0, 8), "b": tensor(8, 16)}, 16, b"", "ab"),
        ({"b": tensor(8, 16), "a": tensor(0, 8)}, 16, b"  ", "ba"),
        ({"a": tensor(0, 8), "b": tensor(8, 8, [0, 5])}, 8, b"\n\t", "ab"),
        ({"a": tensor(0, 4), "b": tensor(0, 0, [0, 2**64 - 1])}, 4, b"", "ab"),
        ({"__metadata__": {"k": "v"}, "a": tensor(0, 4, [])}, 4, b"", "a"),
        (
            {"__metadata__": None, "a": tensor(0, 8, [1], "I64"), "b": tensor(8, 9, [2], "F4")},
            9,
            b"",
            "ab",
        ),
        ({}, 0, b"", ""),
    ],
)
def test_files_of_the_format_are_read(
    header: object, size: int, padding: bytes, names: str, tmp_path: Path
) -> None:
    written(tmp_path / "model.safetensors", header, size, padding)
    assert "".join(stored_tensors(tmp_path)) == names


ONE = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("header", "size", "says"),
    [
        (
            {"a": tensor(0, 8), "b": tensor(4, 12)},
            12,
            "'b' begins at byte 4 of the tensors, and must at byte 8",
        ),
        ({"a": tensor(0, 8), "b": tensor(0, 8)}, 8, "'b' begins at byte 0"),
        ({"a": tensor(0, 8), "b": tensor(12, 20)}, 20, "'b' begins at byte 12"),
        ({"a": tensor(0, 4), "b": tensor(2, 2, [0])}, 4, "'b' begins at byte 2"),
        ({"a": tensor(4, 12)}, 12, "'a' begins at byte 4"),
        ({"a": tensor(0, 8)}, 9, "have 8 bytes, and 9 follow"),
        ({"a": tensor(0, 8)}, 7, "have 8 bytes, and 7 follow"),
        ({"a": tensor(0, 800)}, 8, "have 800 bytes, and 8 follow"),
        ({"a": tensor(0, 8, [3])}, 8, "has 8 bytes, which are not those of its type and shape"),
        ({"a": tensor(4, 0, [0])}, 4, "has -4 bytes"),
        ({"a": tensor(0, 8, [2**62, 2**62])}, 8, "has 8 bytes"),
        ({"a": tensor(0, 0, [2**62, 2**62, 0])}, 0, "has 0 bytes"),
        ({"a": tensor(0, 8, [2**63] * 9999)}, 8, "has 8 bytes"),
        ({"a": tensor(0, 1, [1], "F4")}, 1, "has 1 bytes"),
        ({"a": tensor(0, 8, [2.0])}, 8, "no whole numbers"),
        ({"a": tensor(0, 8, [-2, -1])}, 8, "no whole numbers"),
        ({"a": tensor(0, 4, [True])}, 4, "no whole numbers"),
        ({"a": tensor(0, 4, "1")}, 4, "no whole numbers"),
        ({"a": tensor(0, 0, [0, 10**30])}, 0, "no whole numbers"),
        ({"a": {**tensor(0, 4), "data_offsets": [0, 4.0]}}, 4, "no whole numbers"),
        ({"a": {**tensor(0, 4), "data_offsets": [0, 4, 4]}}, 4, "no whole numbers"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "no whole numbers"),
        ({"a": None}, 0, "no whole numbers"),
        ({"a": tensor(0, 8, None, "F128")}, 8, "has the type 'F128'"),
        ({"a": tensor(0, 8, None, ["F32"])}, 8, "has no type"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__ must be an object of texts"),
        (b'{"a":' + ONE + b',"a":' + ONE + b"}", 4, "'a' is stated twice"),
        (b'{"a":' + ONE[:-1] + b',"shape":[1]}}', 4, "'shape' is stated twice"),
        (b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}', 4, "overflows"),
        (b'{"a":NaN}', 0, "NaN is not a JSON number"),
        (b'{"\xff":' + ONE + b"}", 4, "utf-8"),
        (b"{}\0\0", 0, "is not JSON"),
        (b"[]", 0, "no JSON object"),
        (b'{"a":' * 50_000, 0, "nested more than"),
    ],
)
def test_a_file_that_the_format_forbids_is_refused(
    header: object, size: int, says: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "model.safetensors", header, size)
    with pytest.raises(ConfigError, match=f"{file}: is not a whole safetensors file .*{says}"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cut off"),
        (b"1234567", "cut off"),
        ((99).to_bytes(8, "little") + b"{}", "cut off"),
        ((2**63).to_bytes(8, "little") + b"{}", "cut off"),
    ],
)
def test_a_header_that_is_cut_off_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        stored_tensors(tmp_path)


def test_a_header_larger_than_the_formats_limit_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    with pytest.raises(ConfigError, match="larger than 100,000,000 bytes"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "a/../../model.safetensors",
        "/model.safetensors",
        "",
        "a\0b",
        ".",
        "a//b",
    ],
)
def test_an_index_names_files_of_its_folder_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    written(tmp_path / "other" / "model.safetensors", {"a": tensor(0, 4)}, 4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="files must be in the folder of their index"):
        stored_tensors(tmp_path / "folder")


def test_an_index_may_name_a_subfolder_and_a_link(tmp_path: Path) -> None:
    for folder in ("folder/sub", "blobs"):
        (tmp_path / folder).mkdir(parents=True)
    written(tmp_path / "folder" / "sub" / "one.safetensors", {"a": tensor(0, 4)}, 4)
    blob = written(tmp_path / "blobs" / "1f2e", {"b": tensor(0, 4)}, 4)
    (tmp_path / "folder" / "two.safetensors").symlink_to(blob)
    files = {"a": "sub/one.safetensors", "b": "two.safetensors"}
    (tmp_path / "folder" / INDEX).write_text(json.dumps({"weight_map": files}))
    found = stored_tensors(tmp_path / "folder")
    assert set(found) == {"a", "b"}
    np.testing.assert_array_equal(found["b"].array().view(np.uint8), range(4))
