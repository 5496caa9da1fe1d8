"""Videos: which frames are taken, how they are resized, and what stands for them, next to the libraries' processors."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import VideoMetadata

from octavo.errors import InvalidParameter
from octavo.images.families import read_processor
from octavo.images.image_decoder import prepared_frames
from octavo.images.preparer import ImagePreparer
from octavo.images.processors import ImageProcessor
from octavo.images.resizing import by_area, within_patches
from octavo.images.videos import MOST_PIXELS, Frames, for_frames, in_words, sampled
from tests.images.test_preparing import folder_of, mutated, noise, saved
from tests.models.vision import without_torchvision
from tests.tiers import nightly_after

FAMILIES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm46VForConditionalGeneration": "glm46v",
    "InternVLForConditionalGeneration": "internvl",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "Kimi_K25ForConditionalGeneration": "kimi_k25",
    "Gemma4ForConditionalGeneration": "gemma4",
}
WITHOUT_VIDEOS = ("Gemma3ForConditionalGeneration", "Idefics3ForConditionalGeneration")


def made(architecture: str, folder: Path, video: dict[str, Any] | None = None) -> ImageProcessor:
    folder_of(architecture, folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video or {}))
    found = read_processor(folder)
    assert found is not None
    return found


LENGTHS = [(1, 24.0), (5, 10.0), (50, 10.0), (301, 29.97), (900, 30.0), (9000, 25.0), (20_000, 30.0)]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_frames_are_those_of_the_library(architecture: str, tmp_path: Path) -> None:
    name = FAMILIES[architecture]
    form = made(architecture, tmp_path).video
    assert form is not None
    if name in ("qwen2_5_vl", "llava_onevision"):  # whose processors take all; these are frames of Qwen's own package
        assert sampled(100, 10.0, form.settings)[:: 19 if form.group == 2 else 31] == [0, 99]
        return
    if name == "gemma4":  # whose module cannot be imported without torchvision; the library's default
        assert sampled(100, 10.0, form.settings) == (np.arange(32) * 100 // 32).tolist()
        return
    processors = without_torchvision(name, "video_processing")
    kind = next(
        kind
        for kind in vars(processors)
        if kind.lower() in (f"{name}videoprocessor", f"{name.replace('_', '')}videoprocessor")
    )
    processor = getattr(processors, kind)()
    for total, rate in LENGTHS:
        given = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        options: dict[str, Any] = {"num_frames": min(8, total)} if name == "internvl" else {}
        if name == "smolvlm":
            options = {"num_frames": 64, "fps": 1}
        expected = [int(place) for place in processor.sample_frames(given, **options)]
        if not expected:
            assert sampled(total, rate, form.settings) == [0, 0], "even a short video has a frame"
        elif len(expected) <= form.settings["most_frames"]:
            assert sampled(total, rate, form.settings) == expected, (total, rate)


@pytest.mark.parametrize("name", ["qwen3_vl", "glm4v"])
@pytest.mark.parametrize("count", [2, 5, 16, 200])
def test_sizes_are_those_of_the_without_torchvision(name: str, count: int, tmp_path: Path) -> None:
    architecture = next(key for key, value in FAMILIES.items() if value == name)
    form = made(architecture, tmp_path, {"size": {"shortest_edge": 300_000, "longest_edge": 2_000_000}}).video
    assert form is not None
    settings = for_frames(form.settings, count, form.group)
    resize = without_torchvision(name, "video_processing").smart_resize
    for height, width in ((480, 640), (20, 300), (1080, 1920), (33, 7)):
        expected = resize(count, height, width, 2, settings["factor"], 300_000, 2_000_000)
        assert by_area(height, width, settings) == expected


def test_the_frames_of_qwen25_share_their_area(tmp_path: Path) -> None:
    """As in qwen-vl-utils: each has its share of 0.9 x 128,000 embeddings, within the bounds of a frame."""
    form = made("Qwen2_5_VLForConditionalGeneration", tmp_path).video
    assert form is not None
    most = [for_frames(form.settings, count, 2)["most"] / 28**2 for count in (2, 300, 600, 768)]
    assert most == pytest.approx([768, 768, 384, 300])


WRITTEN = {
    "Qwen2_5_VLForConditionalGeneration": "<|vision_start|>TTTT<|vision_end|>",
    "LlavaOnevisionForConditionalGeneration": "TTTTTTT",
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_words_are_those_of_the_library(architecture: str, tmp_path: Path) -> None:
    """Seven frames of a video of four minutes."""
    processor = made(architecture, tmp_path)
    assert processor.video is not None
    form, places, rate, total = processor.video, [0, 100, 333, 2000, 3001, 4000, 5997], 25.0, 6000
    found = form.written(Frames((7, 28, 28), places, total, rate, b""), "T")
    if architecture in WRITTEN:
        assert found == WRITTEN[architecture]
        return
    name = FAMILIES[architecture]
    module = without_torchvision(name, "processing")
    kind = next(
        kind for kind in vars(module) if kind.lower() in (f"{name}processor", f"{name.replace('_', '')}processor")
    )
    theirs: Any = object.__new__(getattr(module, kind))
    known = {"image_token": "T", "video_token": "T", "image_seq_length": 1, "image_seq_len": 1}
    known |= {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
    }
    known |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    known |= {"fake_image_token": "", "global_image_token": ""}
    vars(theirs).update(known, video_processor=SimpleNamespace(merge_size=1, temporal_patch_size=form.group))
    metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate, frames_indices=places)
    inputs = {"video_grid_thw": np.array([[4, 1, 1]] * 2), "video_metadata": [metadata]}
    shape = SimpleNamespace(shape=(1, 7))
    inputs |= {"num_chunks_per_video": [2], "num_soft_tokens_per_video": [1]}
    inputs |= {"pixel_values": shape, "pixel_values_videos": [SimpleNamespace(shape=(7,))]}
    with patch.object(module, "num2words", {7: "seven"}.__getitem__, create=True):
        expected = theirs.replace_video_token(inputs, 0)
    assert found == form.before + expected.replace("TT", "T") + form.after if name.startswith("glm") else expected


def test_numbers_in_words() -> None:
    numbers = {0: "zero", 12: "twelve", 20: "twenty", 64: "sixty-four", 100: "one hundred", 345: "three hundred and"}
    assert {number: in_words(number)[: len(text)] for number, text in numbers.items()} == numbers
    assert in_words(345).endswith(" forty-five")


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("most_tokens", [400, 8192])
def test_videos_fit_into_the_engine(architecture: str, most_tokens: int, tmp_path: Path) -> None:
    processor = made(architecture, tmp_path).limited(most_tokens)
    form = processor.video
    assert form is not None
    for total in (1, 7, 10_000):
        count = len(sampled(total, 10.0, form.settings))
        settings = for_frames(form.settings, count, form.group)
        groups = -(-count // form.group)
        if form.num_tokens:
            assert groups * form.num_tokens <= max(most_tokens, form.num_tokens)
            continue
        if form.settings["rule"] == "padded":
            rows, columns = (-(-side // 28) * 28 for side in within_patches(720, 1280, settings))
        else:
            rows, columns = by_area(720, 1280, settings)
        assert groups * rows * columns // processor.side**2 <= most_tokens
        assert count * rows * columns <= MOST_PIXELS


def animation(form: str, count: int = 12, duration: int = 100) -> bytes:
    frames = [Image.fromarray(noise(64, 64, seed=number)) for number in range(count)]
    options = {"lossless": True} if form == "WEBP" else {}
    return saved(frames[0], form, save_all=True, append_images=frames[1:], duration=duration, **options)


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImagePreparer]:
    sizes = {"size": {"shortest_edge": 64 * 64, "longest_edge": 64 * 64 * 40}}
    preparer = ImagePreparer(made("Qwen3VLForConditionalGeneration", tmp_path_factory.mktemp("qwen"), sizes))
    yield preparer
    preparer.close()


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animations_are_videos(form: str, preparer: ImagePreparer) -> None:
    """Twelve frames in three seconds, of which Qwen3-VL takes six."""
    video = preparer.prepare_video([animation(form, duration=250)], None, "here")
    assert [image.shape for image in video.images] == [(2, 64, 64)] * 3
    assert video.written.startswith("<0.2 seconds><|vision_start|><|image_pad|><|vision_end|><1.4 seconds>")
    if form != "GIF":  # which has 256 colours
        places = [0, 2, 4, 7, 9, 11]
        exact = b"".join(noise(64, 64, seed=place).tobytes() for place in places)
        assert b"".join(image.pixels for image in video.images) == exact


def test_frames_as_images(preparer: ImagePreparer) -> None:
    files = [saved(Image.fromarray(noise(64, 64, seed=number))) for number in range(3)]
    video = preparer.prepare_video(files, 1.0, "here")
    assert [image.shape for image in video.images] == [(2, 64, 64)] * 2
    assert "<0.5 seconds>" in video.written
    assert "<2.0 seconds>" in video.written
    assert video.images[1].pixels == noise(64, 64, seed=2).tobytes() * 2
    files[1] = saved(Image.fromarray(noise(64, 32)))
    with pytest.raises(InvalidParameter, match="'here': the video has frames of 64 x 64 and of 64 x 32 pixels"):
        preparer.prepare_video(files, 1.0, "here")


def test_bad_videos_are_refused(preparer: ImagePreparer, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="the video is not an MP4, WebM, GIF, WebP or PNG that can be read"):
        preparer.prepare_video([b"#EXTM3U\nfile:///etc/passwd"], None, "here")
    large = saved(Image.new("1", (9000, 9000)))
    with pytest.raises(InvalidParameter, match="has 9000 x 9000 pixels"):
        preparer.prepare_video([large], None, "here")
    for architecture in WITHOUT_VIDEOS:
        assert made(architecture, tmp_path).video is None
    processor = made("InternVLForConditionalGeneration", tmp_path, {"image_mean": [0.1, 0.2, 0.3]})
    assert processor.video is None  # the tower normalises all pixels alike


@pytest.mark.parametrize("count", nightly_after(1, [8, 300]))
@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_damaged_animations_end_neither_process_nor_answer(form: str, count: int, preparer: ImagePreparer) -> None:
    whole, num_refused = animation(form, 4), 0
    for seed in range(count):
        try:
            preparer.prepare_video([mutated(whole, seed)], None, "here")
        except InvalidParameter:
            num_refused += 1
    assert num_refused
    assert len(preparer.prepare_video([whole], None, "here").images) == 2


def test_other_videos_need_pyav(monkeypatch: pytest.MonkeyPatch, preparer: ImagePreparer) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    settings = {**preparer.processor.video.settings, "group": 2} if preparer.processor.video else {}
    for head in (b"\0\0\0\x20ftypisom", b"\x1aE\xdf\xa3webm"):
        with pytest.raises(ValueError, match="needs PyAV on this server: pip install 'octavo\\[video\\]'"):
            prepared_frames([head + bytes(100)], settings)


@pytest.mark.parametrize(("format", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx-vp9")])
def test_containers_are_read_by_pyav(format: str, codec: str, preparer: ImagePreparer) -> None:
    """Thirty frames in three seconds, each of one brightness."""
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(30):
            frame = av.VideoFrame.from_image(Image.new("RGB", (64, 64), (8 * number,) * 3))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    video = preparer.prepare_video([buffer.getvalue()], None, "here")
    places = [0, 6, 12, 17, 23, 29]
    assert [image.shape for image in video.images] == [(2, 64, 64)] * 3
    pixels = np.frombuffer(b"".join(image.pixels for image in video.images), np.uint8).reshape(6, -1)
    assert np.abs(pixels.mean(1) - 8 * np.array(places)).max() < 6
    with pytest.raises(InvalidParameter, match=r"the video is damaged"):
        preparer.prepare_video([buffer.getvalue()[:300]], None, "here")


def test_packets_that_show_nothing_are_no_frames(monkeypatch: pytest.MonkeyPatch, preparer: ImagePreparer) -> None:
    """Of 12 packets an edit list leaves out two, which are marked; others are references of VP8, or need frames that
    were cut off. The last of the 8 frames is white."""
    frames = [Image.new("RGB", (64, 64), (place == 7 and "white") or "black") for place in range(8)]
    packets = [SimpleNamespace(size=9, is_discard=place < 2) for place in range(12)] + [SimpleNamespace(size=0)]
    stream = SimpleNamespace(average_rate=4, codec_context=SimpleNamespace(width=64, height=64))
    container = SimpleNamespace(
        streams=SimpleNamespace(video=[stream]),
        demux=lambda stream: iter(packets),
        seek=lambda place, stream: None,
        decode=lambda stream: (
            SimpleNamespace(width=64, height=64, rotation=0, to_image=lambda image=image: image) for image in frames
        ),
    )
    monkeypatch.setitem(sys.modules, "av", SimpleNamespace(open=lambda *_, **__: contextlib.nullcontext(container)))
    assert preparer.processor.video is not None
    settings = {**preparer.processor.video.settings, "group": 2}
    found = prepared_frames([b"\0\0\0\x20ftypisom"], settings)
    assert (found.total, found.places) == (8, sampled(8, 4.0, settings))
    assert found.places[-1] == 7
    assert set(found.pixels[: -(len(found.pixels) // len(found.places))]) == {0}, "nothing is left of the first round"
    assert found.pixels[-1] == 255
    frames.clear()
    with pytest.raises(ValueError, match="is damaged: 0 of"):
        prepared_frames([b"\0\0\0\x20ftypisom"], settings)


def test_a_video_that_was_cut_without_decoding_it(preparer: ImagePreparer) -> None:
    """The file begins at a key frame before the cut, and a list in it says what to leave out."""
    av = pytest.importorskip("av")
    whole, part = io.BytesIO(), io.BytesIO()
    with av.open(whole, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10, options={"g": "20"})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(40):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 64), (6 * number,) * 3))))
        container.mux(stream.encode())
    with av.open(whole, format="mp4") as source, av.open(part, "w", format="mp4") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        start = int(2.5 / source.streams.video[0].time_base)
        source.seek(start, stream=source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, stream
                container.mux(packet)
    video = preparer.prepare_video([part.getvalue()], None, "here")
    first = np.frombuffer(video.images[0].pixels, np.uint8)[: 64 * 64 * 3]
    assert abs(first.mean() - 6 * 25) < 6
