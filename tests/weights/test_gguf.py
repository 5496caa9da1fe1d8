from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from octavo.errors import CheckpointError
from octavo.weights.gguf import gguf_reader
from octavo.weights.gguf.gguf_reader import GGUFFile
from tests.weights import gguf_bytes as make
from tests.weights.gguf_bytes import file, pair, string, tensor


def opened(folder: Path, data: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return GGUFFile.open(path)


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve ☃")
    writer.add_array("a.strings", ["", "é", "x" * 1000])
    writer.add_array("a.floats", [1.5, -2.5])
    writer.add_array("a.bools", [True, False])
    weights = np.random.default_rng(0).normal(size=(3, 4, 32)).astype(np.float32)
    writer.add_tensor("three.dims", weights)
    quantised = reference.quants.quantize(weights, reference.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", quantised, raw_dtype=reference.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = GGUFFile.open(path)
    meta = found.metadata
    assert (meta["a.u8"], meta["a.i64"], meta["a.f64"], meta["a.bool"]) == (255, -(2**40), 0.1, True)
    assert meta["a.string"] == "naïve ☃"
    assert meta["a.strings"] == ["", "é", "x" * 1000]
    assert meta["a.floats"].tolist() == [1.5, -2.5]
    assert meta["a.bools"].tolist() == [True, False]
    assert meta["general.architecture"] == "llama"
    assert (found.tensors["three.dims"].kind, found.tensors["three.dims"].shape) == ("F32", (3, 4, 32))
    assert found.data("three.dims").tobytes() == weights.tobytes()
    assert (found.tensors["blocks"].kind, found.tensors["blocks"].shape) == ("Q8_0", (3, 4, 32))
    assert found.data("blocks").tobytes() == quantised.tobytes()
    assert not found.data("blocks").flags.writeable


@pytest.mark.parametrize("version", [2, 3])
def test_alignment_and_versions(tmp_path: Path, version: int) -> None:
    data = file([pair("general.alignment", 128)], [tensor("t", [2], 0, 128)], bytes(128) + b"abcdefgh", alignment=128)
    data = data[:4] + struct.pack("<I", version) + data[8:]
    assert opened(tmp_path, data).data("t").tobytes() == b"abcdefgh"


@pytest.mark.timing
def test_a_large_vocabulary_loads_fast(tmp_path: Path) -> None:
    data = file([pair("tokens", [f"token{index}" for index in range(256_000)])])
    start = time.perf_counter()
    assert len(opened(tmp_path, data).metadata["tokens"]) == 256_000
    assert time.perf_counter() - start < 2


def test_files_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    for path in (tmp_path / "missing", tmp_path / "fifo", tmp_path / "empty", tmp_path, Path("/dev/zero")):
        with pytest.raises(CheckpointError, match=str(path)):
            GGUFFile.open(path)


ONE = [tensor("t", [32], 0, 0)]
KEY = string("k")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + file()[4:], "magic.*b'GGML'"),
    "version 1": (file(version=1), "version: found 1, supported are 2 and 3"),
    "big-endian": (file(version=3 << 24), "version: found 50331648"),
    "only magic": (b"GGUF", "version: needs 4 bytes"),
    "tensor count": (file(num_tensors=2**63), "number of tensors: 9223372036854775808, at most 65536"),
    "tensor count in the limit": (file(num_tensors=60000), "number of tensors .60000.: needs"),
    "key count": (file(num_pairs=2**64 - 1), "number of metadata keys: 18446744073709551615, at most 65536"),
    "key count in the limit": (file(num_pairs=60000), "number of metadata keys .60000.: needs"),
    "key length": (file([struct.pack("<Q", 2**64 - 8) + bytes(100)]), "metadata key 0: string of 18446744073709551608"),
    "key past the end": (file([struct.pack("<Q", 5000) + bytes(100)]), "metadata key 0: needs 5000 bytes"),
    "key not UTF-8": (file([string(b"\xff\xfe") + struct.pack("<IB", 0, 1)]), "metadata key 0: not UTF-8"),
    "value not UTF-8": (file([KEY + struct.pack("<I", 8) + string(b"\xc3(")]), "metadata 'k': not UTF-8"),
    "key twice": (file([pair("k", 1), pair("k", 2)]), "metadata 'k': appears twice"),
    "value type": (file([KEY + struct.pack("<IQ", 13, 0)]), "metadata 'k': has value type 13"),
    "bool": (file([KEY + struct.pack("<IB", 7, 2)]), "metadata 'k': a bool must be 0 or 1, found 2"),
    "bools": (file([KEY + struct.pack("<IIQBB", 9, 7, 2, 1, 9)]), "metadata 'k': a bool must be 0 or 1, found 9"),
    "nested": (file([KEY + struct.pack("<II", 9, 9) * 40]), "metadata 'k': is an array of arrays"),
    "array type": (file([KEY + struct.pack("<IIQ", 9, 99, 1) + bytes(9)]), "metadata 'k': has value type 99"),
    "array count": (file([KEY + struct.pack("<IIQ", 9, 5, 2**62)]), "number of elements: 4611686018427387904, at most"),
    "array wraps": (file([KEY + struct.pack("<IIQ", 9, 12, 2**61)]), "number of elements: 2305843009213693952"),
    "array past the end": (file([KEY + struct.pack("<IIQ", 9, 12, 20) + bytes(64)]), "'k': needs 160 bytes"),
    "string count": (file([KEY + struct.pack("<IIQ", 9, 8, 2**60)]), "number of strings: 1152921504606846976"),
    "strings past the end": (file([KEY + struct.pack("<IIQ", 9, 8, 99) + bytes(64)]), "strings .99.: needs 792"),
    "string in array": (
        file([KEY + struct.pack("<IIQQ", 9, 8, 2, 2**64 - 16) + bytes(40)]),
        r"metadata 'k'\[0\]: string of 18446744073709551600",
    ),
    "string in array past the end": (
        file([KEY + struct.pack("<IIQQ", 9, 8, 2, 40) + bytes(20)]),
        r"metadata 'k'\[0\]: needs 40 bytes",
    ),
    "long string in array": (
        file([KEY + struct.pack("<IIQ", 9, 8, 1) + string("v" * ((1 << 20) + 1))]),
        r"metadata 'k'\[0\]: string of 1048577 bytes",
    ),
    "last length past the end": (
        file([KEY + struct.pack("<IIQQ", 9, 8, 2, 8) + b"12345678"])[:70],
        r"metadata 'k'\[1\]: needs 8 bytes",
    ),
    "string in array not UTF-8": (
        file([KEY + struct.pack("<IIQ", 9, 8, 1) + string(b"\xe9")]),
        r"metadata 'k'\[0\]: not UTF-8",
    ),
    "alignment 0": (file([pair("general.alignment", 0)], ONE, bytes(128)), "general.alignment: found 0"),
    "alignment 3": (file([pair("general.alignment", 3)], ONE, bytes(128)), "general.alignment: found 3"),
    "alignment 2**31": (
        file([pair("general.alignment", 1 << 31)], ONE, bytes(128)),
        "general.alignment: found 2147",
    ),
    "alignment text": (file([pair("general.alignment", "32")], ONE, bytes(128)), "general.alignment: found '32'"),
    "alignment bool": (file([pair("general.alignment", True)], ONE, bytes(128)), "general.alignment: found True"),
    "no dims": (file(tensors=[tensor("t", [], 0, 0) + bytes(8)]), "tensor 't': has 0 dimensions"),
    "5 dims": (file(tensors=[tensor("t", [1] * 5, 0, 0)]), "tensor 't': has 5 dimensions, allowed are 1 to 4"),
    "2**32-1 dims": (file(tensors=[string("t") + struct.pack("<I", 2**32 - 1) + bytes(64)]), "has 4294967295 dim"),
    "zero dim": (file(tensors=[tensor("t", [32, 0], 0, 0)]), r"tensor 't': shape \(0, 32\) has a zero"),
    "2**60 values": (file(tensors=[tensor("t", [2**60], 0, 0)], data=bytes(64)), "tensor 't': lies at bytes"),
    "product wraps": (file(tensors=[tensor("t", [2**32, 2**32], 0, 0)]), "tensor 't': lies at bytes"),
    "bytes wrap": (file(tensors=[tensor("t", [2**62], 0, 0)]), "tensor 't': lies at bytes"),
    "offset wraps": (file(tensors=[tensor("t", [32], 0, 2**64 - 32)], data=bytes(128)), "tensor 't': lies at bytes"),
    "offset unaligned": (file(tensors=[tensor("t", [8], 0, 4)], data=bytes(128)), "offset 4 is not a multiple"),
    "tensor past the end": (
        file(tensors=ONE, data=bytes(127)),
        "tensor 't': lies at bytes 64 to 192, but the",
    ),
    "row not whole blocks": (
        file(tensors=[tensor("t", [48], 2, 0)], data=bytes(64)),
        "row length 48 is not a",
    ),
    "unsupported type": (file(tensors=[tensor("t", [256], 41, 0)]), "tensor 't': has type Q1_0, supported are F32"),
    "unknown type": (file(tensors=[tensor("t", [256], 999, 0)]), "tensor 't': has type 999"),
    "tensor twice": (file(tensors=[*ONE, tensor("t", [8], 0, 128)], data=bytes(256)), "tensor 't': appears twice"),
    "same place": (file(tensors=[*ONE, tensor("u", [32], 0, 0)], data=bytes(128)), "inside tensor"),
    "overlap": (
        file(tensors=[tensor("u", [32], 0, 96), *ONE], data=bytes(256)),
        "tensor 'u': starts at byte .*, inside tensor 't'",
    ),
    "tensor name": (file(tensors=[string("n" * ((1 << 20) + 1)) + bytes(64)]), "name of tensor 0: string of 1048577"),
    "long value": (file([KEY + struct.pack("<I", 8) + string("v" * ((1 << 20) + 1))]), "'k': string of 1048577 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path, data)
    assert str(caught.value).startswith(str(tmp_path / "model.gguf"))
    assert len(str(caught.value)) < 1000


def test_a_header_has_an_end(tmp_path: Path) -> None:
    pairs = [string(f"k{index}") + struct.pack("<I", 8) + string(bytes(1 << 20)) for index in range(33)]
    with pytest.raises(CheckpointError, match=f"the {gguf_reader.MAX_HEADER_BYTES} bytes allowed for a header"):
        opened(tmp_path, file(pairs))


def test_strings_in_all_arrays_are_counted_together(tmp_path: Path) -> None:
    half = struct.pack("<IIQ", 9, 8, gguf_reader.MAX_STRINGS // 2 + 1) + bytes(8) * (gguf_reader.MAX_STRINGS // 2 + 1)
    assert len(opened(tmp_path, file([string("a") + half])).metadata["a"]) == gguf_reader.MAX_STRINGS // 2 + 1
    with pytest.raises(CheckpointError, match="'b': number of strings: 524289, at most 524287"):
        opened(tmp_path, file([string("a") + half, string("b") + half]))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = make.llama_file({"tokenizer.ggml.tokens": ["a", "bc"]})
    header_bytes = GGUFFile.open(write(tmp_path / "whole.gguf", data)).tensors["token_embd.weight"].offset
    for size in [*range(1, header_bytes, 7), *range(header_bytes, len(data), 997)]:
        with pytest.raises(CheckpointError):
            opened(tmp_path, data[:size])


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
