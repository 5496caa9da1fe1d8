"""From files to resized pixels: next to the libraries' processors, over odd and damaged files, within limits."""

from __future__ import annotations

import io
import json
import random
import string
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import (
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    Glm4vImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
)

from octavo.errors import CheckpointError, InvalidParameter
from octavo.images.families import HALF, PROCESSORS, read_processor
from octavo.images.image_decoder import FORMATS, as_rgb, opened, prepared
from octavo.images.preparer import ImagePreparer, placed
from octavo.images.processors import (
    AROUND_TILE,
    LFM_PLACE,
    LFM_WHOLE,
    LLAMA4_MARKS,
    NUMBER_MARKS,
    SLICE_MARKS,
    TILE_END,
    WHOLE,
    ImageProcessor,
    PreparedImage,
    place_of,
)
from octavo.images.resizing import ImageRefused, most_in_slice, sliced
from octavo.images.tiling import size_of, tiled
from octavo.text.chat_template import ChatTemplate
from octavo.text.conversation import Conversation
from tests.tiers import nightly_after, one_in

AREA = {"rule": "area", "factor": 28, "least": 56 * 56, "most": 28 * 28 * 40, "resample": 3}
GROWN = {**AREA, "least": 8 * 28 * 28, "grows": True}
FIXED = {"rule": "fixed", "height": 56, "width": 56, "resample": 2}
SQUARES = {"rule": "squares", "factor": 12, "most": 70, "resample": 3}
LONGEST = {"rule": "longest", "longest": 112, "factor": 28, "resample": 3}
GRID = {"rule": "grid", "height": 56, "width": 42, "least": 1, "most": 6, "resample": 3}
POINTS = [[56, 56], [56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
PINPOINTS = {"rule": "pinpoints", "side": 56, "cells": 4, "most": 0, "pinpoints": POINTS, "resample": 3}
SPLIT = {"rule": "split", "side": 56, "longest": 168, "splits": True, "resample": 1}
MIDDLE = {"rule": "middle", "side": 56, "resample": 3}
RULES = {"area": AREA, "grown": GROWN, "fixed": FIXED, "longest": LONGEST, "squares": SQUARES, "grid": GRID}
RULES |= {"pinpoints": PINPOINTS, "split": SPLIT, "in one": {**SPLIT, "splits": False}, "middle": MIDDLE}
LIBRARY: dict[str, Callable[[dict[str, Any]], Any]] = {
    "grid": lambda settings: GotOcr2ImageProcessorPil(
        crop_to_patches=True, size={"height": 56, "width": 42}, max_patches=6, do_normalize=False
    ),
    "pinpoints": lambda settings: LlavaNextImageProcessorPil(
        image_grid_pinpoints=POINTS, do_normalize=False, size={"shortest_edge": 56}, crop_size=SQUARE
    ),
    "split": lambda settings: Idefics3ImageProcessorPil(
        size={"longest_edge": 168},
        max_image_size={"longest_edge": 56},
        do_image_splitting=settings["splits"],
        do_normalize=False,
    ),
    "middle": lambda settings: LlavaImageProcessorPil(size={"shortest_edge": 56}, crop_size=SQUARE, do_normalize=False),
}
SQUARE = {"height": 56, "width": 56}
"""Processors of the library that give tiles."""
QWEN = ImageProcessor(
    settings=AREA,
    mean=HALF,
    deviation=HALF,
    placeholder="<i>",
    token=7,
    side=28,
    has_grid=True,
)


def noise(width: int, height: int, bands: int = 3, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    shape = (height, width) if bands == 1 else (height, width, bands)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(noise(60, 40)), "JPEG", exif=exif, quality=95)


def palette(with_transparency: bool) -> bytes:
    image = Image.fromarray(noise(50, 50)).quantize(20)
    return saved(image, transparency=3) if with_transparency else saved(image)


def animated(form: str) -> bytes:
    frames = [Image.fromarray(noise(40, 30, seed=i)) for i in range(3)]
    return saved(frames[0], form, save_all=True, append_images=frames[1:], duration=50)


def sixteen_bits() -> bytes:
    return saved(Image.fromarray((np.arange(80 * 60, dtype=np.uint32) * 13).astype(np.uint16).reshape(60, 80)))


NASTY: dict[str, Callable[[], bytes]] = {
    **{f"turned {i}": (lambda i=i: turned(i)) for i in range(1, 9)},
    "plain": lambda: saved(Image.fromarray(noise(100, 80))),
    "alpha": lambda: saved(Image.fromarray(noise(60, 60, 4))),
    "grey": lambda: saved(Image.fromarray(noise(60, 60, 1))),
    "grey with alpha": lambda: saved(Image.fromarray(noise(60, 60, 4)).convert("LA")),
    "palette": lambda: palette(False),
    "palette with transparency": lambda: palette(True),
    "one bit": lambda: saved(Image.fromarray(noise(60, 60, 1)).convert("1")),
    "transparent colour": lambda: saved(Image.fromarray(noise(30, 30)), transparency=(1, 2, 3)),
    "transparent grey": lambda: saved(Image.fromarray(noise(30, 30, 1)), transparency=5),
    "CMYK": lambda: saved(Image.fromarray(noise(60, 60)).convert("CMYK"), "JPEG"),
    "grey JPEG": lambda: saved(Image.fromarray(noise(60, 60, 1)), "JPEG"),
    "progressive": lambda: saved(Image.fromarray(noise(60, 60)), "JPEG", progressive=True),
    "WebP": lambda: saved(Image.fromarray(noise(60, 60)), "WEBP", lossless=True),
    "WebP with alpha": lambda: saved(Image.fromarray(noise(60, 60, 4)), "WEBP", lossless=True),
    "animated GIF": lambda: animated("GIF"),
    "animated WebP": lambda: animated("WEBP"),
    "animated PNG": lambda: animated("PNG"),
    "GIF with transparency": lambda: saved(Image.fromarray(noise(20, 20)).quantize(8), "GIF", transparency=2),
    "BMP": lambda: saved(Image.fromarray(noise(33, 21)), "BMP"),
    "one pixel": lambda: saved(Image.fromarray(noise(1, 1))),
    "wide": lambda: saved(Image.fromarray(noise(300, 3))),
    "tall": lambda: saved(Image.fromarray(noise(2, 180))),
    "large": lambda: saved(Image.fromarray(noise(900, 700))),
}


def unnormalised(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[C, H, W] of a processor without normalisation, as [H, W, C]."""
    return np.moveaxis(np.asarray(pixels), 0, -1)


def ours(data: bytes, settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    shape, _, pixels = prepared(data, settings)
    return np.frombuffer(pixels, np.uint8).reshape(*shape, 3) / 255


def theirs(data: bytes, settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What the library's processor makes of the upright first frame."""
    image = Image.open(io.BytesIO(data))
    image.load()
    from PIL import ImageOps  # only for its reading of the orientation

    image = ImageOps.exif_transpose(image)
    rule = settings["rule"]
    if rule in LIBRARY:
        tiles = np.asarray(LIBRARY[rule](settings)([image])["pixel_values"])
        return np.moveaxis(tiles.reshape(-1, *tiles.shape[-3:]), 1, -1)
    if rule == "fixed":
        found = Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, do_normalize=False, do_convert_rgb=True)
        return unnormalised(found([image])["pixel_values"][0])
    if rule == "longest":
        size = {"longest_edge": 112}
        found = PixtralImageProcessorPil(size=size, patch_size=28, do_normalize=False)
        return unnormalised(found([image])["pixel_values"][0])
    if rule == "squares":
        result = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4)([image])
        columns, rows = result["image_position_ids"][0].max(0) + 1
        tiles = result["pixel_values"][0][: rows * columns].reshape(rows, columns, 4, 4, 3)
        return np.asarray(tiles.transpose(0, 2, 1, 3, 4).reshape(rows * 4, columns * 4, 3))
    count = 2 if settings.get("grows") else 1
    size = {"shortest_edge": count * settings["least"], "longest_edge": count * settings["most"]}
    made = Glm4vImageProcessorPil if settings.get("grows") else Qwen2VLImageProcessorPil
    result = made(size=size, do_normalize=False)([image])
    _, rows, columns = result["image_grid_thw"][0]
    patches = np.asarray(result["pixel_values"]).reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[..., 0, :, :]
    return patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 14, columns * 14, 3)


@one_in(3)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_pixels_are_those_of_the_library(rule: dict[str, Any]) -> None:
    assert len(NASTY) >= 30
    for name, make in NASTY.items():
        data = make()
        found, expected = ours(data, rule), theirs(data, rule)
        expected = expected if expected.ndim == 4 else expected[None]
        assert found.shape == expected.shape, name
        assert np.abs(found - expected).max() <= 1 / 255 + 1e-6, name


def test_numbers_of_sixteen_bits_keep_their_meaning() -> None:
    """Where the library clips all above 255."""
    with Image.open(io.BytesIO(sixteen_bits())) as image:
        exact = np.asarray(image) / 65_535
    found = np.asarray(as_rgb(opened(sixteen_bits(), 10**6)))[..., 0] / 255
    assert np.abs(found - exact).max() <= 1 / 255


def test_bombs_are_refused_by_their_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> None:
        raise AssertionError("it was decoded")

    bomb = bytearray(saved(Image.new("RGB", (8, 8))))
    monkeypatch.setattr(Image.Image, "load", load)
    bomb[16:24] = (50_000).to_bytes(4) * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4)
    with pytest.raises(ImageRefused, match="has 50000 x 50000 pixels; at most 40000000 are allowed"):
        prepared(bytes(bomb), AREA)


@pytest.fixture(scope="module")
def preparer() -> Iterator[ImagePreparer]:
    preparer = ImagePreparer(QWEN)
    yield preparer
    preparer.close()


def test_a_child_process_prepares_and_refuses(preparer: ImagePreparer) -> None:
    image = preparer.prepare(saved(Image.fromarray(noise(100, 80))), "auto", "here")
    assert image.shape == (1, 84, 112)
    assert len(image.pixels) == 84 * 112 * 3
    with pytest.raises(InvalidParameter, match="'here': the image is not a PNG"):
        preparer.prepare(b"text", "auto", "here")
    too_many = saved(Image.new("1", (8000, 6000)))
    with pytest.raises(InvalidParameter, match="has 8000 x 6000 pixels"):
        preparer.prepare(too_many, "auto", "here")


def mutated(data: bytes, seed: int) -> bytes:
    """Some bytes changed, a part cut out or repeated."""
    rng, found = random.Random(seed), bytearray(data)
    for _ in range(rng.randint(1, 12)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    if seed % 3 == 0:
        del found[rng.randrange(len(found)) :]
    elif seed % 3 == 1:
        start = rng.randrange(len(found))
        found[start:start] = found[start : start + rng.randrange(200)]
    return bytes(found)


@pytest.mark.parametrize("count", nightly_after(1, [8, 300]))
@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_end_neither_process_nor_answer(form: str, count: int, preparer: ImagePreparer) -> None:
    """Each gives pixels or a refusal; the process that decodes them is the same at the end."""
    whole = saved(Image.fromarray(noise(64, 48)), form)
    preparer.prepare(whole, "auto", "here")
    num_prepared = 0
    for seed in range(count):
        try:
            image = preparer.prepare(mutated(whole, seed), "auto", "here")
        except InvalidParameter:
            continue
        else:
            num_prepared += 1
            assert len(image.pixels) == image.shape[1] * image.shape[2] * 3
    assert num_prepared < count
    assert preparer.prepare(whole, "auto", "here").shape == (1, 56, 56)


def test_placeholders_are_expanded_by_their_place() -> None:
    images = [PreparedImage((1, 56, 84), (), bytes(56 * 84 * 3)), PreparedImage((1, 28, 28), (), bytes(28 * 28 * 3))]
    tokens, inputs = placed([1, 7, 2, 7], images, QWEN)
    assert tokens == [1, *[7] * 6, 2, 7]
    assert [(image.start, image.num_tokens, image.grid) for image in inputs] == [(1, 6, (2, 3)), (8, 1, (1, 1))]
    assert inputs[0].digest != inputs[1].digest


@pytest.mark.parametrize("rows", [30, 900])
def test_the_size_of_an_image_is_known_without_resizing_it(rows: int) -> None:
    (tile,), _ = tiled(Image.new("RGB", (700, rows)), QWEN.settings_for("auto"))
    assert (tile.height, tile.width) == size_of(rows, 700, QWEN.settings_for("auto"))


def test_digests_tell_pixels_shapes_and_settings_apart() -> None:
    pixels = bytes(56 * 28 * 3)
    digests = {
        QWEN.placed(PreparedImage((1, 56, 28), (), pixels), 0).digest,
        QWEN.placed(PreparedImage((1, 28, 56), (), pixels), 0).digest,
        QWEN.placed(PreparedImage((1, 56, 28), (1,), pixels), 0).digest,
        QWEN.placed(PreparedImage((1, 56, 28), (), pixels[:-1] + b"\1"), 0).digest,
        QWEN.limited(20).placed(PreparedImage((1, 56, 28), (), pixels), 0).digest,
    }
    assert len(digests) == 5
    assert {len(digest) for digest in digests} == {32}


def folder_of(architecture: str, folder: Path) -> Path:
    """A checkpoint that says nothing of its images but that it takes some."""
    names = [AROUND_TILE, WHOLE, "<image>", *(place_of(row, column) for row in range(1, 5) for column in range(1, 5))]
    names += [TILE_END, *LLAMA4_MARKS, LFM_WHOLE, "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 13))]
    names += [LFM_PLACE.format(row, column) for row in range(1, 11) for column in range(1, 11)]
    names += [*NUMBER_MARKS, *SLICE_MARKS[1:], *string.digits, "<|image_pad|>"]
    added = [{"content": name, "id": 300 + i} for i, name in enumerate(names)]
    config = {"architectures": [architecture], "vision_config": {"hidden_size": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"added_tokens": added, "model": {"vocab": {"Ċ": 1, "ĊĊ": 2}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def num_tokens(processor: ImageProcessor, width: int, height: int, detail: str = "auto") -> int:
    shape, details, pixels = prepared(saved(Image.new("RGB", (width, height))), processor.settings_for(detail))
    return len(processor.tokens(PreparedImage(shape, details, pixels)))


@one_in(5)
@pytest.mark.parametrize("architecture", PROCESSORS)
def test_images_of_every_family_can_be_smaller(architecture: str, tmp_path: Path) -> None:
    """With ``detail`` low, and in an engine with few slots for embeddings."""
    processor = read_processor(folder_of(architecture, tmp_path))
    assert processor is not None
    sizes = [(800, 600), (1, 1), (20, 900)]
    whole = [num_tokens(processor, *size) for size in sizes]
    assert all(
        low <= count for low, count in zip([num_tokens(processor, *s, "low") for s in sizes], whole, strict=True)
    )
    if processor.settings["rule"] not in ("fixed", "middle"):
        most = 2000 if processor.settings["rule"] == "pinpoints" else 500
        few = processor.limited(most)
        assert all(num_tokens(few, *size) <= min(most, count) for size, count in zip(sizes, whole, strict=True))


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("Lfm2VlForConditionalGeneration", "<|img_row_1_col_1|>"),
        ("SmolVLMForConditionalGeneration", "<fake_token_around_image>"),
    ],
)
def test_a_vocabulary_without_the_tokens_of_tiles_has_no_images(
    family: str, missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a model serves text."""
    folder = folder_of(family, tmp_path)
    (folder / "tokenizer.json").unlink()
    assert read_processor(folder) is None
    assert f"images are refused: the vocabulary has no {missing}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "preprocessor"),
    [
        ({"vision_config": {"patch_size": 0}}, {}),
        ({"vision_config": "x"}, {}),
        ({"vision_config": {"patch_size": float("inf")}}, {}),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, {"size": 3}),
        ({}, {"image_mean": 3}),
        ({}, {"image_mean": [0.5] * 4}),
        ({}, {"image_std": [0.5, 0.0, 0.5]}),
        ({"architectures": {"a": 1}}, {}),
        ({"architectures": ["DeepseekOcr2ForConditionalGeneration"]}, {"tile_size": 3}),
        ({"architectures": ["LlavaOnevisionForConditionalGeneration"]}, {"image_grid_pinpoints": 2}),
        ({"architectures": ["GotOcr2ForConditionalGeneration"], "vision_config": {"patch_size": 10**30}}, {}),
        ({"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "audio_config": {"n_window": 0}}, {}),
        ({"architectures": ["VoxtralForConditionalGeneration"], "audio_config": {"hidden_size": -5120}}, {}),
    ],
)
def test_wrong_types_are_errors_of_the_checkpoint(
    changes: dict[str, Any], preprocessor: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of("InternVLForConditionalGeneration", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    with pytest.raises(CheckpointError, match="the image processor cannot be read"):
        read_processor(folder)


def test_settings_of_images_are_files_of_the_folder(tmp_path: Path) -> None:
    folder = folder_of("InternVLForConditionalGeneration", tmp_path)
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    (folder / "preprocessor_config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is a link to /dev/zero"):
        read_processor(folder)


@pytest.mark.parametrize("is_declared", [False, True])
def test_the_texts_of_omni_are_those_of_its_vocabulary(tmp_path: Path, is_declared: bool) -> None:
    """Its template writes them, where Qwen2.5-VL has others for the same ids. Folders without a tokenizer.json declare
    them elsewhere."""
    texts = {"<|vision_bos|>": 151_652, "<|vision_eos|>": 151_653, "<|IMAGE|>": 151_655}
    tokenizer = {"added_tokens": [{"content": text, "id": number} for text, number in texts.items()]}
    thinker = {"image_token_index": 151_655, "vision_config": {"hidden_size": 64}}
    config = {"architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    decoder = {"added_tokens_decoder": {str(number): {"content": text} for text, number in texts.items()}}
    name = "tokenizer_config.json" if is_declared else "tokenizer.json"
    (tmp_path / name).write_text(json.dumps(decoder if is_declared else tokenizer))
    (tmp_path / "config.json").write_text(json.dumps(config))
    processor = read_processor(tmp_path)
    assert processor is not None
    template = ChatTemplate(
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "Look"}]
    form = processor.image_text
    prompt = Conversation([{"role": "user", "content": content}], template, image_text=form).prompt()
    assert prompt.text == "<|vision_bos|><|IMAGE|><|vision_eos|>Look"
    assert (prompt.images, form.alone) == ((0,), "<|vision_bos|><|IMAGE|><|vision_eos|>")


@pytest.mark.parametrize(("factor", "side"), [(56, 448), (28, 448), (28, 450), (28, 1000), (64, 100)])
def test_no_slice_has_more_tokens_than_its_bound(factor: int, side: int) -> None:
    settings = {"side": side, "factor": factor}
    sizes = [sliced(*pair, settings, grows=True) for n in range(1000, 200_001, 50) for pair in ((1000, n), (n, 1000))]
    largest = max(rows * columns for rows, columns in sizes) // factor**2
    assert largest <= most_in_slice(-(-side // factor)) <= 1.3 * largest
