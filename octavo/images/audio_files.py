"""Sound files to samples, in the child process of ``image_decoder``: mono, at the rate that a model's tower reads.

WAV is read here, as its variants are many and small; all else is read by PyAV, if that is installed. FFmpeg is told
the format and never guesses it: some, such as playlists, would open other files. A sound is decoded piece by piece, so
that a small file of many hours ends at the limit. Between the file and the answer samples are float32 in [-1, 1].
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.images.audio import SAMPLE_BYTES
from octavo.images.resizing import ImageRefused, refusing

Floats = NDArray[np.float32]
Piece = tuple[int, Floats]
"""Samples a second, and mono samples."""

NEEDS_PYAV = "needs PyAV on this server: pip install 'octavo[audio]'; WAV needs nothing"
LOWEST_RATE, HIGHEST_RATE = 1_000, 192_000
MAGIC = {b"fLaC": "flac", b"OggS": "ogg", b"\x1aE\xdf\xa3": "matroska"}
PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
WAV_TYPES = {(PCM, 1): "u1", (PCM, 2): "<i2", (PCM, 3): "u1", (PCM, 4): "<i4", (FLOAT, 4): "<f4", (FLOAT, 8): "<f8"}
WAV_TYPES |= {(A_LAW, 1): "u1", (MU_LAW, 1): "u1"}
"""numpy's type for a format and the bytes of a sample; those of 24 bits are put together from three."""
PIECE_BYTES = 1 << 20
PADDING_SECONDS = 0.25
"""By which a sound may be too long, and is cut: the first and last frames of most codecs are filled up."""
CROSSINGS, BETA = 51, 7.86
"""Zero crossings on each side of the resampling filter, and the parameter of its Kaiser window: the pass band ends at
0.9 of the Nyquist frequency, and -80 dB are reached at it (Kaiser 1974)."""
MIDDLE = 0.95
"""Of the filter's transition, in Nyquist frequencies."""
BLOCK = 1 << 18
"""Samples that are resampled at once, or more: these many fit into a processor's cache."""


def samples_of(data: bytes, rate: int, most_seconds: float) -> bytes:
    """The sound of a file as mono at ``rate`` samples a second, each a signed integer of 24 bits, little-endian.

    Channels are averaged; what exceeds the range is clipped. Of n samples become ceil(n * rate / the file's rate).
    A sound that is longer than ``most_seconds`` only by padding is cut. Raises ``ImageRefused``.
    """
    with refusing("is damaged and cannot be decoded"):
        pieces = _pieces(data, most_seconds)
        first = next(pieces, None)
        if first is None:
            raise ImageRefused("has no samples")
        found = first[0]
        if not LOWEST_RATE <= found <= HIGHEST_RATE:
            raise ImageRefused(f"has {found} samples a second; {LOWEST_RATE} to {HIGHEST_RATE} are read")
        sound = _limited(chain([first], pieces), found, most_seconds)
        return b"".join(_as_24_bits(piece) for piece in resampled(sound, found, rate))


def _limited(pieces: Iterator[Piece], rate: int, most_seconds: float) -> Iterator[Floats]:
    left = int(most_seconds * rate)
    for found, piece in pieces:
        if found != rate:
            raise ImageRefused(f"has parts of {rate} and of {found} samples a second")
        yield piece[: max(0, left)]
        left -= len(piece)
        if left < -PADDING_SECONDS * rate:
            raise ImageRefused(f"is longer than the {most_seconds:g} s that are allowed")


def _refuse_long(seconds: float, most_seconds: float) -> None:
    if seconds > most_seconds + PADDING_SECONDS:
        raise ImageRefused(f"has {math.ceil(seconds * 100) / 100:g} s; at most {most_seconds:g} s are allowed")


def _as_24_bits(samples: Floats) -> bytes:
    scaled = np.clip(np.rint(samples * (1 << 23)), -(1 << 23), (1 << 23) - 1)
    return scaled.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :SAMPLE_BYTES].tobytes()


def _pieces(data: bytes, most_seconds: float) -> Iterator[Piece]:
    """The sound of a file, whose kind is known by its first bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _of_wav(data, most_seconds)
    place = 0
    while data[place : place + 3] == b"ID3" and len(data) - place > 10:  # tags; seven bits of a byte are of their size
        sizes = zip(data[place + 6 : place + 10], (21, 14, 7, 0), strict=True)
        place += 10 + sum((byte & 0x7F) << shift for byte, shift in sizes)
    if place:
        data = data[place:].lstrip(b"\0")
    if data[4:8] == b"ftyp":
        return _of_container(data, "mp4", most_seconds)
    if data[:4] in MAGIC:
        return _of_container(data, MAGIC[data[:4]], most_seconds)
    if data[:1] == b"\xff" and len(data) > 1 and data[1] >= 0xE0:
        return _of_container(data, "mp3" if data[1] & 0x06 else "aac", most_seconds)
    raise ImageRefused("is not a WAV, MP3, FLAC, Ogg, AAC, MP4 or WebM file that can be read")


def _of_wav(data: bytes, most_seconds: float) -> Iterator[Piece]:
    tag = channels = rate = block = 0
    place, size = 12, 0
    while True:
        name, size = struct.unpack_from("<4sI", data, place)
        place += 8
        if name == b"data":
            break
        if name == b"fmt ":
            tag, channels, rate, _, block = struct.unpack_from("<HHIIH", data, place)
            if tag == EXTENSIBLE:
                (tag,) = struct.unpack_from("<H", data, place + 24)
        place += size + size % 2
    width = block // max(channels, 1)
    if (tag, width) not in WAV_TYPES or block != width * channels:
        raise ImageRefused(f"is a WAV file of format {tag}, {block} bytes for {channels} channels, which is not read")
    if not size:  # of a writer that could not go back; others have 0xFFFFFFFF
        size = len(data)
    frames = min(size, len(data) - place) // block  # without the last one where it is cut off
    _refuse_long(frames / max(rate, 1), most_seconds)
    step = max(1, PIECE_BYTES // block)
    for start in range(0, frames, step):
        count = min(step, frames - start) * channels * (width if width == 3 else 1)
        values = np.frombuffer(data, WAV_TYPES[tag, width], count, place + start * block)
        yield rate, _mono(_unpacked(values, tag, width), channels)


def _unpacked(values: NDArray[Any], tag: int, width: int) -> NDArray[Any]:
    """Samples as an array of numbers, from the bytes of a WAV file."""
    if width == 3:
        padded = np.zeros((len(values) // 3, 4), np.uint8)
        padded[:, 1:] = values.reshape(-1, 3)
        return padded.view("<i4")[:, 0]
    return values if tag in (PCM, FLOAT) else _of_logarithms(tag)[values]


def _of_logarithms(tag: int) -> Floats:
    """What each byte of A-law or mu-law stands for (ITU-T G.711)."""
    codes = np.arange(256) ^ (0x55 if tag == A_LAW else 0xFF)
    exponents, mantissas = codes >> 4 & 7, codes & 15
    if tag == A_LAW:
        steps = np.where(exponents, 2 * mantissas + 33 << np.maximum(exponents - 1, 0), 2 * mantissas + 1)
        values = np.where(codes & 0x80, steps, -steps) / 4096
    else:
        steps = (2 * mantissas + 33 << exponents) - 33
        values = np.where(codes & 0x80, -steps, steps) / 8192
    return values.astype(np.float32)


def _mono(values: NDArray[Any], channels: int) -> Floats:
    """The mean of ``channels`` that take turns. Integers have the range of their type."""
    floats: Floats
    if values.dtype.kind == "f":
        floats = np.nan_to_num(np.clip(values, -1, 1)).astype(np.float32, copy=False)
    else:
        half = 2.0 ** (8 * values.dtype.itemsize - 1)
        floats = values.astype(np.float32) / np.float32(half) - np.float32(values.dtype.kind == "u")
    if channels > 1:
        floats = floats.reshape(-1, channels) @ np.full(channels, 1 / channels, np.float32)
    return floats


def _of_container(data: bytes, format: str, most_seconds: float) -> Iterator[Piece]:
    try:
        import av  # only here: most servers get no such files
    except ImportError:
        raise ImageRefused(NEEDS_PYAV) from None
    with av.open(io.BytesIO(data), format=format) as container:
        if not container.streams.audio:
            raise ImageRefused("has no sound")
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        if format in ("mp4", "flac", "ogg") and stream.duration:  # that of others is a guess from their bit rate
            _refuse_long(float(stream.duration * stream.time_base), most_seconds)
        balance = 0
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except MemoryError:
                raise
            except av.error.FFmpegError:  # cut off, or a tag: left out, as FFmpeg's demuxers leave out much
                balance -= 1
                continue
            balance += len(frames)
            for frame in frames:
                values, channels = frame.to_ndarray(), frame.layout.nb_channels
                yield frame.sample_rate, _mono((values.T if frame.format.is_planar else values).ravel(), channels)
        if balance < 0:
            raise ImageRefused("is damaged: most of it cannot be decoded")


def resampled(pieces: Iterator[Floats], old: int, new: int) -> Iterator[Floats]:
    """Samples at the rate ``new`` of those at the rate ``old``: low-passed below both Nyquist frequencies.

    The filter is a sinc with a Kaiser window. A period, in which it takes all its phases once, is ``up`` samples of
    the result and ``down`` of the source; it is made at least as long as the filter. A period is then a row of a
    matrix, and a phase is the product of some of its columns with one filter.
    """
    if old == new:
        yield from pieces
        return
    filters, up, down = _filters(old, new)
    held, total, given = [np.zeros(filters.taps // 2 - 1, np.float32)], 0, 0
    size = len(held[0])
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        total += len(piece)
        if size >= max(BLOCK, 16 * down):
            buffer, count = np.concatenate(held), size // down - 1
            yield _filtered(buffer, filters, up, down, count, up)
            held, size, given = [buffer[count * down :]], size - count * down, given + count * up
    left = -(-total * new // old) - given
    count = -(-left // up)
    buffer = np.concatenate([*held, np.zeros(max(0, (count + 1) * down - size), np.float32)])
    yield _filtered(buffer, filters, up, down, count, left)[:left]


class _Filters:
    """A filter [taps] for each of so many places of a result between two samples, made when it is first used: there may
    be tens of thousands, and a short sound needs a few."""

    def __init__(self, up: int, down: int, scale: float) -> None:
        self.count, self.taps = up, 2 * math.ceil(CROSSINGS / scale)
        self._down, self._scale = down, scale
        self._made: dict[int, Floats] = {}

    def __getitem__(self, phase: int) -> Floats:
        if phase not in self._made:
            place = phase * self._down % self.count / self.count + self.taps // 2 - 1
            distances = (place - np.arange(self.taps)) * self._scale
            window = np.i0(BETA * np.sqrt(np.maximum(0, 1 - (distances / CROSSINGS) ** 2)))
            row = np.sinc(distances * MIDDLE) * window
            self._made[phase] = (row / row.sum()).astype(np.float32)
        return self._made[phase]


def _filters(old: int, new: int) -> tuple[_Filters, int, int]:
    """The filters, and the samples of a period: of the result, and of the source."""
    divisor = math.gcd(old, new)
    up, down = new // divisor, old // divisor
    filters = _Filters(up, down, min(1.0, new / old))
    times = -(-filters.taps // down)
    return filters, up * times, down * times


def _filtered(buffer: Floats, filters: _Filters, up: int, down: int, count: int, most: int) -> Floats:
    """``count`` periods of the result, whose first sample is in the middle of the buffer's first ones; of a single one
    the first ``most`` samples."""
    found = np.empty((count, up), np.float32)
    for phase in range(up if count > 1 else min(up, most)):
        start = phase * down // up
        rows = buffer[start : start + count * down].reshape(count, down)
        found[:, phase] = rows[:, : filters.taps] @ filters[phase % filters.count]
    return found.ravel()
