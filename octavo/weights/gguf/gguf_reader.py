"""A reader for untrusted GGUF files, versions 2 and 3, little-endian.

A GGUF file consists of a header with counts, key-value metadata, a tensor table, and the tensors' bytes (specification:
``docs/gguf.md`` in the ggml project). Every number in it is checked against the size of the file before it is used,
sizes are Python integers, and every error is a ``CheckpointError`` with the file, the key or tensor, what was found and
what is allowed.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.weights.gguf.block_formats import BLOCK_KINDS
from octavo.weights.gguf.split_files import parts_of

MAX_HEADER_BYTES = 32 << 20
"""Most bytes before the first tensor. A vocabulary of 256k tokens with merges takes about half of that."""
MAX_STRINGS = 1 << 20
"""Most strings in all metadata arrays together; each takes many times its size in the file."""
MAX_STRING_BYTES = 1 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

MIN_PAIR_BYTES = 8 + 4 + 1
"""Length of an empty key, type, and the smallest value."""
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
"""Length of an empty name, number of dimensions, one dimension, type, and offset."""

STRING, ARRAY, BOOL = 8, 9, 7
NUMBER_TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""Type number of a metadata value to its dtype; a bool is a byte that must be 0 or 1."""

TENSOR_KINDS = (
    {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"}
    | {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
    | {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
    | {29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
)
"""Names of tensor types by number, including unsupported ones, so that error messages can name them."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's location: ``offset`` in the file and ``nbytes``; ``shape`` has the row length last."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0
    """Index of its file, if the file was split."""


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF file, or all parts of one that was split, of which the first has the metadata.

    ``metadata`` arrays of numbers are numpy arrays, arrays of strings are lists.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    mapped: tuple[mmap.mmap, ...]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map the file, or the parts of which ``path`` is one, and read the headers.

        Raises ``CheckpointError`` if a file is no valid GGUF file, or a part is missing or of another file.
        """
        paths = parts_of(path)
        for part in paths if len(paths) > 1 else ():
            if not part.exists():
                raise CheckpointError(f"{part}: is missing; {path.name} is one of {len(paths)} parts")
        files = [_read_file(part, index) for index, part in enumerate(paths)]
        tensors: dict[str, GGUFTensor] = {}
        for file in files:
            if twice := tensors.keys() & file.tensors.keys():
                raise CheckpointError(f"{file.path}: tensor {_short(min(twice))} is in an earlier part, too")
            tensors |= file.tensors
        for index, file in enumerate(files):
            _check_split(file, index, len(files), len(tensors))
        return cls(paths[0], files[0].metadata, tensors, tuple(mapped for file in files for mapped in file.mapped))

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the file, uint8 [nbytes]."""
        tensor = self.tensors[name]
        return np.frombuffer(self.mapped[tensor.part], dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)


def vocabulary(path: Path) -> list[str]:
    """The tokens of a GGUF file, by id; none if it has no tokenizer. Raises ``CheckpointError``."""
    tokens = GGUFFile.open(path).metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []


def _read_file(path: Path, part: int) -> GGUFFile:
    mapped = _map(path)
    header = _Header(path, mapped)
    num_tensors = _read_counts(header)
    metadata = _read_metadata(header)
    tensors = _read_tensors(header, num_tensors, _alignment(header, metadata))
    return GGUFFile(path, metadata, {name: replace(tensor, part=part) for name, tensor in tensors.items()}, (mapped,))


def _check_split(file: GGUFFile, index: int, count: int, num_tensors: int) -> None:
    """Raise ``CheckpointError`` unless the metadata of a part say that it is this part of the file."""
    found = file.metadata.get("split.count", 1)
    if type(found) is not int or found != count:
        raise CheckpointError(
            f"{file.path}: metadata 'split.count' is {_short(found)}, but by its name it is one of {count} parts; "
            "they are found by the ends of their names, such as -00001-of-00002.gguf"
        )
    expected = {"split.no": index, "split.tensors.count": num_tensors} if count > 1 else {}
    for key, value in expected.items():
        if (found := file.metadata.get(key)) != value:
            raise CheckpointError(f"{file.path}: metadata {key!r} is {_short(found)}; it must be {value}")


def _map(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


class _Header:
    """A cursor over the part of the file before the tensors; no read goes past the file or the limit."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.file_size = len(mapped)
        self.end = min(self.file_size, MAX_HEADER_BYTES)
        self.at = 0
        self.num_pairs = 0
        self.num_strings = 0

    def fail(self, what: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}: {problem}")

    def need(self, num_bytes: int, what: str) -> None:
        """Raise an error unless ``num_bytes`` more can be read."""
        if num_bytes > self.end - self.at:
            limit = "the file" if self.end == self.file_size else f"the {MAX_HEADER_BYTES} bytes allowed for a header"
            self.fail(what, f"needs {num_bytes} bytes at {self.at}, but {limit} ends at {self.end}")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        start, self.at = self.at, self.at + num_bytes
        return self.mapped[start : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, min_bytes: int, limit: int) -> int:
        """Read a count of items of at least ``min_bytes`` each, bounded by ``limit`` and by the bytes that follow."""
        count = self.u64(what)
        if count > limit:
            self.fail(what, f"{count}, at most {limit} are allowed")
        self.need(count * min_bytes, f"{what} ({count})")
        return count

    def string(self, what: str) -> str:
        length = self.u64(what)
        if length > MAX_STRING_BYTES:
            self.fail(what, f"string of {length} bytes, at most {MAX_STRING_BYTES} are allowed")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            self.fail(what, f"not UTF-8: {error}")

    def strings(self, count: int, what: str) -> list[str]:
        """Read ``count`` strings. The loop is inlined for speed: vocabularies have over 100,000 strings."""
        mapped, at, end = self.mapped, self.at, self.end
        length_at = struct.Struct("<Q").unpack_from
        result = []
        for index in range(count):
            # A length field beyond the end is reported like a string that does not fit.
            length = length_at(mapped, at)[0] if at + 8 <= end else MAX_STRING_BYTES + end
            if length > MAX_STRING_BYTES or length > end - at - 8:
                self.at = at
                self.string(f"{what}[{index}]")
            at += 8 + length
            try:
                result.append(str(mapped[at - length : at], "utf-8"))
            except UnicodeDecodeError as error:
                self.fail(f"{what}[{index}]", f"not UTF-8: {error}")
        self.at = at
        return result


def _read_counts(header: _Header) -> int:
    magic = header.take(4, "magic")
    if magic != b"GGUF":
        header.fail("magic", f"found {magic!r}, a GGUF file starts with b'GGUF'")
    version = header.u32("version")
    if version not in (2, 3):
        header.fail("version", f"found {version}, supported are 2 and 3, little-endian")
    num_tensors = header.count("number of tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
    header.num_pairs = header.count("number of metadata keys", MIN_PAIR_BYTES, MAX_KEYS)
    return num_tensors


def _read_metadata(header: _Header) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(header.num_pairs):
        key = header.string(f"metadata key {index}")
        what = f"metadata {_short(key)}"
        if key in metadata:
            header.fail(what, "appears twice")
        kind = header.u32(what)
        metadata[key] = _read_array(header, what) if kind == ARRAY else _read_scalar(header, kind, what)
    return metadata


def _read_scalar(header: _Header, kind: int, what: str) -> Any:
    if kind == STRING:
        return header.string(what)
    return _read_numbers(header, kind, 1, what)[0].item()


def _read_array(header: _Header, what: str) -> npt.NDArray[Any] | list[str]:
    kind = header.u32(what)
    if kind == ARRAY:
        header.fail(what, "is an array of arrays, only one level is allowed")
    if kind == STRING:
        count = header.count(f"{what}: number of strings", 8, MAX_STRINGS - header.num_strings)
        header.num_strings += count
        return header.strings(count, what)
    return _read_numbers(header, kind, header.count(f"{what}: number of elements", 1, MAX_HEADER_BYTES), what)


def _read_numbers(header: _Header, kind: int, count: int, what: str) -> npt.NDArray[Any]:
    dtype = NUMBER_TYPES.get(kind)
    if dtype is None:
        header.fail(what, f"has value type {kind}, known are 0 to 12")
    numbers = np.frombuffer(header.take(count * dtype.itemsize, what), dtype=dtype)
    if kind != BOOL:
        return numbers
    if numbers.size and numbers.max() > 1:
        header.fail(what, f"a bool must be 0 or 1, found {numbers.max()}")
    return numbers.astype(np.bool_)


def _alignment(header: _Header, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power or alignment > MAX_ALIGNMENT:
        header.fail(
            "metadata general.alignment", f"found {_short(alignment)}, must be a power of two from 1 to {MAX_ALIGNMENT}"
        )
    return int(alignment)


def _read_tensors(header: _Header, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    """The tensor table, with offsets counted from the start of the file."""
    tensors: dict[str, GGUFTensor] = {}
    for index in range(num_tensors):
        name = header.string(f"name of tensor {index}")
        what = f"tensor {_short(name)}"
        if name in tensors:
            header.fail(what, "appears twice")
        tensors[name] = _read_tensor(header, what, alignment)
    data_start = -(-header.at // alignment) * alignment
    placed = {
        name: GGUFTensor(tensor.kind, tensor.shape, data_start + tensor.offset, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    _check_places(header, placed)
    return placed


def _read_tensor(header: _Header, what: str, alignment: int) -> GGUFTensor:
    num_dims = header.u32(what)
    if not 1 <= num_dims <= MAX_DIMS:
        header.fail(what, f"has {num_dims} dimensions, allowed are 1 to {MAX_DIMS}")
    # The file has the row length first.
    shape = tuple(header.u64(what) for _ in range(num_dims))[::-1]
    if 0 in shape:
        header.fail(what, f"shape {shape} has a zero")
    number = header.u32(what)
    kind = TENSOR_KINDS.get(number, str(number))
    if kind not in BLOCK_KINDS:
        header.fail(what, f"has type {kind}, supported are {', '.join(BLOCK_KINDS)}")
    block = BLOCK_KINDS[kind]
    if shape[-1] % block.length:
        header.fail(what, f"row length {shape[-1]} is not a multiple of {block.length}, the block length of {kind}")
    offset = header.u64(what)
    if offset % alignment:
        header.fail(what, f"offset {offset} is not a multiple of the alignment {alignment}")
    return GGUFTensor(kind, shape, offset, math.prod(shape[:-1]) * block.row_bytes(shape[-1]))


def _check_places(header: _Header, tensors: dict[str, GGUFTensor]) -> None:
    """Every tensor lies inside the file, and no two share a byte."""
    previous, previous_end = "", 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        what = f"tensor {_short(name)}"
        end = tensor.offset + tensor.nbytes
        if end > header.file_size:
            header.fail(what, f"lies at bytes {tensor.offset} to {end}, but the file ends at {header.file_size}")
        if tensor.offset < previous_end:
            header.fail(what, f"starts at byte {tensor.offset}, inside tensor {_short(previous)}")
        previous, previous_end = name, end


def _short(value: object) -> str:
    """A name or value from the file, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
