from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.errors import CheckpointError
from octavo.weights.folder import MAX_JSON_BYTES, find_file, parse_json, read_json


def test_a_file_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1, 2.5, null, {"b": "é"}]}')
    assert read_json(tmp_path, "config.json") == {"a": [1, 2.5, None, {"b": "é"}]}
    assert read_json(tmp_path, "other.json") is None


def test_the_layout_of_the_hub_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00d").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/f00d")
    assert find_file(snapshot, "config.json") == blobs / "f00d"
    assert read_json(snapshot, "config.json") == {}
    (snapshot / "gone.json").symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=r"gone.json: missing, or not a regular file"):
        find_file(snapshot, "gone.json")
    (snapshot / "out.json").symlink_to("../../../secret.json")
    with pytest.raises(CheckpointError, match=r"out.json: is a link to"):
        find_file(snapshot, "out.json")


def test_links_within_the_folder_and_to_the_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.json").write_text("{}")
    (tmp_path / "real" / "b.json").symlink_to("a.json")
    (tmp_path / "link").symlink_to("real")
    assert read_json(tmp_path / "link", "b.json") == {}


def test_what_is_not_a_file_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "not-snapshots" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_text("{}")
    (folder / "out.json").symlink_to(tmp_path / "secret")
    (folder / "blob.json").symlink_to(tmp_path / "blobs" / "x")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "fifo.json")
    for name in ("out.json", "blob.json", "zero.json", "loop.json", "folder.json", "fifo.json"):
        with pytest.raises(CheckpointError, match=name):
            read_json(folder, name)


def test_size_and_depth_are_bounded() -> None:
    with pytest.raises(CheckpointError, match=r"x.json: JSON is larger than the 16777216 bytes allowed"):
        parse_json(b" " * (MAX_JSON_BYTES + 1), "x.json")
    with pytest.raises(CheckpointError, match=r"x.json: JSON has more than the 1048576 values allowed"):
        parse_json(b'{"a": [' + b"1," * (1 << 20) + b"1]}", "x.json")
    with pytest.raises(CheckpointError, match=r"x.json: JSON is nested too deeply"):
        parse_json(b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "x.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "not valid JSON: 'a' appears twice"),
        (b'{"a": NaN}', "NaN is not allowed"),
        (b'{"a": -Infinity}', "-Infinity is not allowed"),
        (b'{"a": 1', "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
    ],
)
def test_json_that_is_not_sound(text: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_json(text, "x.json")
