"""Sound files: each form next to the samples it was made from, damaged ones, and the limits of the child process."""

from __future__ import annotations

import io
import json
import struct
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from octavo.images.audio_files import A_LAW, EXTENSIBLE, FLOAT, MU_LAW, PCM, resampled, samples_of
from octavo.images.preparer import MAX_MEMORY, MAX_OUTPUT, MAX_SECONDS, WORKER
from octavo.images.resizing import ImageRefused
from octavo.llm.image_inputs import audio_file_of
from octavo.system.child_process import ChildLost, ChildProcess
from octavo.system.child_worker import LENGTH, REFUSED, RENDERED
from tests.images.test_preparing import mutated
from tests.tiers import nightly_after

Array = np.ndarray[Any, Any]
RATE = 16_000
FULL = 1 << 23
"""What stands for 1 in 24 bits."""


def wav(
    data: bytes, tag: int, width: int, *, channels: int = 1, rate: int = RATE, size: int | None = None, **more: Any
) -> bytes:
    """A WAV file whose header says that its sound has ``size`` bytes. ``more``: ``extended``, whether the header has
    the longer form; and ``before`` and ``after``, chunks around the sound."""
    given = EXTENSIBLE if more.get("extended") else tag
    block = width * channels
    header = struct.pack("<HHIIHH", given, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, 8 * width)
    if more.get("extended"):
        header += struct.pack("<HHIH14s", 22, 8 * width, 0, tag, b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71")
    size = len(data) if size is None else size
    body = b"WAVE" + chunk(b"fmt ", header) + more.get("before", b"")
    body += b"data" + struct.pack("<I", size) + data + more.get("after", b"")
    return b"RIFF" + struct.pack("<I", len(body)) + body


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def read(data: bytes, rate: int = RATE, most_seconds: float = 300.0) -> Array:
    """The samples of a file, -FULL to FULL - 1."""
    return integers(samples_of(data, rate, most_seconds))


def integers(samples: bytes) -> Array:
    padded = np.pad(np.frombuffer(samples, np.uint8).reshape(-1, 3), ((0, 0), (1, 0)))
    return padded.view("<i4")[:, 0] >> 8


def tone(frequency: float, rate: int, seconds: float) -> Array:
    return np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("name", ["u1", "<i2", "<i3", "<i4", "<f4", "<f8"])
def test_samples_are_those_of_the_file(name: str, extended: bool) -> None:
    values = np.random.default_rng(0).integers(-FULL, FULL, 1001)
    values[:3] = -FULL, 0, FULL - 1
    width = int(name[-1])
    if name[-2] == "f":
        data, expected = (values / FULL).astype(name).tobytes(), values
    elif width == 1:
        data, expected = (values // 2**16 + 128).astype(name).tobytes(), values // 2**16 * 2**16
    else:
        data = (values << 8).astype("<i4").view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()
        expected = values // 2 ** max(0, 24 - 8 * width) * 2 ** max(0, 24 - 8 * width)
    tag = FLOAT if name[-2] == "f" else PCM
    assert (read(wav(data, tag, width, extended=extended)) == expected).all()


@pytest.mark.parametrize("tag", [A_LAW, MU_LAW])
def test_logarithms_of_telephones(tag: int) -> None:
    """The largest and the smallest values are those of G.711's tables; each segment has sixteen equal steps."""
    values = read(wav(bytes(range(256)), tag, 1)) // 2**8
    ends = {A_LAW: {0x2A: -32256, 0xAA: 32256, 0x55: -8, 0xD5: 8}, MU_LAW: {0: -32124, 0x80: 32124, 0x7F: 0, 0xF0: 120}}
    assert {code: values[code] for code in ends[tag]} == ends[tag]
    assert (values[:128] == -values[128:]).all()
    steps = np.diff(np.sort(values[128:]))
    expected = [16, 16, 32, 64, 128, 256, 512, 1024] if tag == A_LAW else [8 << shift for shift in range(8)]
    assert [set(steps[16 * part : 16 * part + 15]) for part in range(8)] == [{step} for step in expected]


def test_channels_are_averaged_and_large_values_clipped() -> None:
    assert (
        read(wav(np.array([1000, -500, 7, 8, 9, 10], "<i2").tobytes(), PCM, 2, channels=2)) == [64000, 1920, 2432]
    ).all()
    floats = np.array([0.5, 2.0, -3e38, np.nan, np.inf, 0.25], "<f4").tobytes()
    assert (read(wav(floats, FLOAT, 4)) == [FULL // 2, FULL - 1, -FULL, 0, FULL - 1, FULL // 4]).all()


SOUND = np.arange(-500, 500, dtype="<i2").tobytes()


@pytest.mark.parametrize(
    "file",
    [
        wav(SOUND, PCM, 2, before=chunk(b"LIST", b"INFOodd") + chunk(b"fact", bytes(4))),
        wav(SOUND, PCM, 2, after=chunk(b"LIST", b"INFO") + chunk(b"id3 ", b"ID3")),
        wav(SOUND, PCM, 2, size=0),
        wav(SOUND, PCM, 2, size=0xFFFFFFFF),
        wav(SOUND, PCM, 2, size=0x7FFFF000),
        wav(SOUND + b"\1", PCM, 2),
        wav(SOUND + b"\1", PCM, 2, size=len(SOUND) + 2),
    ],
    ids=["chunks before", "chunks behind", "no size", "unknown size", "sizes of streams", "odd", "cut off"],
)
def test_odd_wav_files(file: bytes) -> None:
    assert (read(file) == np.arange(-500, 500) * 256).all()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "is not a WAV, MP3, FLAC"),
        (b"#EXTM3U\nfile:///etc/passwd", "is not a WAV, MP3, FLAC"),
        (b"RIFF\0\0\0\0WAVE", "is damaged"),
        (wav(b"", PCM, 2), "has no samples"),
        (wav(b"\0", PCM, 2), "has no samples"),
        (wav(bytes(99), 85, 1), "is a WAV file of format 85, 1 bytes for 1 channels, which is not read"),
        (wav(bytes(99), PCM, 2, channels=0), "which is not read"),
        (wav(bytes(99), PCM, 2, rate=0), "has 0 samples a second; 1000 to 192000 are read"),
        (wav(bytes(99), PCM, 2, rate=2**32 - 1), "has 4294967295 samples a second"),
        (wav(bytes(6), PCM, 2, size=4)[:40], "is damaged"),
        (wav(bytes(825_001), PCM, 1, rate=2000), "has 412.51 s; at most 300 s are allowed"),
    ],
)
def test_bad_files_are_refused(file: bytes, message: str) -> None:
    with pytest.raises(ImageRefused, match=message):
        read(file)


RATES = [
    (48_000, RATE),
    (44_100, RATE),
    (8_000, RATE),
    (22_050, 24_000),
    (192_000, RATE),
    (44_056, RATE),
    (11_025, 8_000),
]


def converted(signal: Array, old: int, new: int) -> Array:
    """What resampling makes of a signal that comes in pieces, without its ends, where it meets silence."""
    given = signal.astype(np.float32)
    found = np.concatenate(list(resampled(iter(np.array_split(given, 7)), old, new)))
    assert len(found) == -(-len(given) * new // old)
    return found[new // 50 : -new // 50]


@pytest.mark.parametrize(("old", "new"), RATES)
def test_resampling_keeps_what_both_rates_have(old: int, new: int) -> None:
    """0.1 dB are 0.0115; a delay would show as well."""
    for part in (0.01, 0.3, 0.7, 0.9):
        frequency = part * min(old, new) / 2
        expected = tone(frequency, new, 2)[new // 50 : -new // 50]
        found = converted(tone(frequency, old, 2), old, new)
        assert np.abs(found[: len(expected)] - expected).max() < 1e-3


@pytest.mark.parametrize(("old", "new"), RATES)
def test_resampling_adds_nothing(old: int, new: int) -> None:
    """What the new rate cannot have is gone, and no mirror images come: below -80 dB."""
    for part in (1.001, 1.02, 1.1, 1.5):
        if new < old:
            if part * new < old:
                assert np.abs(converted(tone(part * new / 2, old, 2), old, new)).max() < 1e-4
            continue
        frequency = (2 - part) * old / 2
        found, times = converted(tone(frequency, old, 2), old, new), 2 * np.pi * frequency / new
        waves = np.stack([wave(times * np.arange(len(found))) for wave in (np.sin, np.cos)], 1)
        assert np.abs(found - waves @ np.linalg.lstsq(waves, found, rcond=None)[0]).max() < 1e-4


@pytest.mark.parametrize("count", [1, 2, 17, 1000, 700_000])
def test_pieces_do_not_matter(count: int) -> None:
    given = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    whole = np.concatenate(list(resampled(iter([given]), 44_100, RATE)))
    assert len(whole) == -(-count * RATE // 44_100)
    parts = np.concatenate(list(resampled(iter(np.array_split(given, 13)), 44_100, RATE)))
    assert np.abs(parts - whole).max() < 1e-5


@pytest.mark.timing
def test_a_minute_takes_less_than_a_second() -> None:
    file = wav(np.random.default_rng(0).bytes(60 * 48_000 * 4), PCM, 2, channels=2, rate=48_000)
    start = time.process_time()
    assert len(samples_of(file, RATE, 300.0)) == 60 * RATE * 3
    assert time.process_time() - start < 1


CONTAINERS = {
    "mp3": ("mp3", "libmp3lame", 48_000),
    "flac": ("flac", "flac", 44_100),
    "vorbis": ("ogg", "vorbis", 44_100),
    "opus": ("ogg", "libopus", 48_000),
    "m4a": ("mp4", "aac", 44_100),
    "aac": ("adts", "aac", 32_000),
    "webm": ("webm", "libopus", 48_000),
    "mkv": ("matroska", "pcm_s16le", 32_000),
}


def encoded(name: str, sound: Array, rate: int | None = None) -> bytes:
    """A file with the sound, float32 [2, samples]."""
    av = pytest.importorskip("av")
    format, codec, usual = CONTAINERS[name]
    buffer, rate = io.BytesIO(), rate or usual
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo", options={"strict": "experimental"})
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound, np.float32), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        stream.codec_context.open()
        size = stream.codec_context.frame_size or 4096
        resampler = av.AudioResampler(stream.codec_context.format.name, "stereo", rate, frame_size=size)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def chirp(rate: int, seconds: float = 2.0) -> Array:
    """A sound with one place where it fits, twice as loud on the left."""
    times = np.arange(round(rate * seconds)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * (200 + 400 * times) * times)] * 2) * [[1], [0.5]]


@pytest.fixture(scope="module", params=CONTAINERS)
def container(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    name = request.param
    return name, encoded(name, chirp(CONTAINERS[name][2]))


def test_other_files_are_read_by_pyav(container: tuple[str, bytes]) -> None:
    """Two seconds, at the same place to the sample but for ADTS, which does not say where the sound begins."""
    name, file = container
    found, expected = read(file) / FULL, chirp(RATE).mean(0)
    delay = 1024 * RATE // 32_000 if name == "aac" else 0
    assert 0 <= len(found) - len(expected) - delay < 400  # the last frame is filled up
    middle = slice(RATE // 10, len(expected) - RATE // 10)
    error = np.abs(found[delay:][middle] - expected[middle])
    assert error.mean() < (1e-5 if name in ("flac", "mkv") else 0.015), "a sample's delay were 0.1"
    assert (read(file, most_seconds=2.0)[:30_000] == read(file)[:30_000]).all()
    assert len(read(file, most_seconds=2.0)) == 2 * RATE, "what fills up the last frame does not count"
    with pytest.raises(ImageRefused, match=r"at most 1\.5 s are allowed|is longer than the 1\.5 s that are allowed"):
        read(file, most_seconds=1.5)


def test_tags_before_the_sound() -> None:
    for name in ("mp3", "aac", "flac"):
        file = encoded(name, chirp(48_000), 48_000)
        tag = b"ID3\4\0\0\0\0\1\x10" + b"\xff\xfb\x90\0" + bytes(140)  # has what looks like sound
        assert (read(tag + tag + file) == read(file)).all()


def test_a_video_without_sound() -> None:
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        container.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
        container.mux(stream.encode())
    with pytest.raises(ImageRefused, match="has no sound"):
        read(buffer.getvalue())


def test_other_files_need_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for head in (
        b"fLaC",
        b"OggS",
        b"\0\0\0\x20ftypM4A ",
        b"\x1aE\xdf\xa3",
        b"\xff\xfb\x90\0",
        b"ID3\4\0\0\0\0\0\0\xff\xfb",
    ):
        with pytest.raises(ImageRefused, match="needs PyAV on this server: pip install 'octavo\\[audio\\]'"):
            read(head + bytes(100))
    assert len(read(wav(SOUND, PCM, 2))) == 1000


class Child:
    """The process as the server uses it: another one follows one that ended."""

    def __init__(self) -> None:
        self.process: ChildProcess | None = None

    def ask(self, data: bytes) -> tuple[bytes, bytes]:
        """The kind of an answer, and its body, or why the process ended."""
        if self.process is None or not self.process.is_alive:
            limits = {"max_seconds": MAX_SECONDS, "max_memory": MAX_MEMORY, "max_output": MAX_OUTPUT}
            self.process = ChildProcess(WORKER, limits)
        settings = json.dumps({"audio": {"rate": RATE, "most_seconds": 60.0}}).encode()
        try:
            return self.process.ask_bytes(LENGTH.pack(len(settings)) + settings + data)
        except ChildLost as error:
            return b"", str(error).encode()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    if child.process is not None:
        child.process.close()


def check_damaged(file: bytes, seed: int, child: Child) -> None:
    """It may seem to need more memory than the process may use, and else is refused, or gives samples."""
    kind, answer = child.ask(file)
    assert kind in (RENDERED, REFUSED) or answer == b"it needed more than 1024 MiB of memory", (seed, answer)


def test_the_child_answers(child: Child) -> None:
    kind, answer = child.ask(wav(SOUND, PCM, 2))
    (size,) = LENGTH.unpack_from(answer)
    assert kind == RENDERED
    assert json.loads(answer[4 : 4 + size]) == [[1, 1, 1000]]
    assert (integers(answer[4 + size :]) == np.arange(-500, 500) * 256).all()
    assert child.ask(b"nothing") == (
        REFUSED,
        b"is not a WAV, MP3, FLAC, Ogg, AAC, MP4 or WebM file that can be read",
    )


@pytest.mark.parametrize("count", nightly_after(1, [20, 500]))
def test_damaged_containers_are_refused_or_read(count: int, container: tuple[str, bytes], child: Child) -> None:
    for seed in range(count):
        check_damaged(mutated(container[1], seed), seed, child)


@pytest.mark.parametrize("count", nightly_after(1, [50, 500]))
@pytest.mark.parametrize(("tag", "width"), [(PCM, 2), (PCM, 3), (FLOAT, 4), (MU_LAW, 1)])
def test_damaged_wav_files_are_refused_or_read_nor_answer(tag: int, width: int, count: int, child: Child) -> None:
    """Mostly their headers, as sound that was changed is sound."""
    file = wav(
        np.random.default_rng(0).bytes(6000),
        tag,
        width,
        channels=2,
        rate=44_100,
        extended=True,
        before=chunk(b"x   ", b"y"),
    )
    for seed in range(count):
        check_damaged(mutated(file[:90], seed) + file[90:], seed, child)


def test_a_wav_file_that_claims_four_gigabytes(child: Child) -> None:
    assert child.ask(wav(SOUND, PCM, 2, size=0xFFFFFFF0))[0] == RENDERED
    kind, reason = child.ask(wav(bytes(20 << 20), MU_LAW, 1, rate=8000, size=0xFFFFFFF0))
    assert (kind, reason) == (REFUSED, b"has 2621.44 s; at most 60 s are allowed")


@pytest.mark.parametrize("name", ["mp3", "flac", "aac", "opus"])
def test_hours_of_silence(name: str, child: Child) -> None:
    """In files of a few hundred kilobytes: by what the header says, and by what was decoded where it says nothing."""
    if name in ("mp3", "aac"):
        file = encoded(name, np.zeros((2, 96_000))) * 4000
    else:
        file = encoded(name, np.zeros((2, 16_000 * 100)), 16_000)
    kind, reason = child.ask(file)
    assert kind == REFUSED
    assert reason.endswith(b"s that are allowed" if name in ("mp3", "aac") else b" s; at most 60 s are allowed")
    if name == "flac":
        kind, reason = child.ask(file[:21] + bytes([file[21] & 0xF0]) + bytes(4) + file[26:])
        assert (kind, reason) == (REFUSED, b"is longer than the 60 s that are allowed")


def test_a_short_sound_of_an_odd_rate_needs_few_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there are 16,000: to make them all took seconds, for a file of 46 bytes."""
    made: list[int] = []
    i0 = np.i0
    monkeypatch.setattr(np, "i0", lambda values: (made.append(len(values)), i0(values))[1])
    for count in (1, 120):
        made.clear()
        sound = np.concatenate(list(resampled(iter([np.ones(count, np.float32)]), 191_999, RATE)))
        assert len(made) == len(sound) == -(-count * RATE // 191_999)


def test_a_rate_may_be_a_number_of_numpy() -> None:
    """As scipy and others give it."""
    samples = np.linspace(-0.5, 0.5, 1600, dtype=np.float32)
    assert audio_file_of((samples, np.int64(8000)), "it") == audio_file_of((samples, 8000), "it")
