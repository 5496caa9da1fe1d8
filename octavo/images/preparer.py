"""Prepares images in child processes, and puts what stands for them into prompts."""

from __future__ import annotations

import base64
import binascii
import json
import os
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.config import ModelSettings
from octavo.errors import InvalidParameter
from octavo.images.audio import RATE
from octavo.images.families import read_processor
from octavo.images.processors import ImageProcessor, PreparedClip, PreparedImage
from octavo.images.videos import Frames
from octavo.system.child_process import ChildLost, ChildProcess
from octavo.system.child_worker import LENGTH, REFUSED, RENDERED
from octavo.text.conversation import ChatPrompt
from octavo.types import ImageInput
from octavo.weights.hub import resolve_model

WORKER = "octavo.images.image_decoder"
MAX_SECONDS = 20.0
"""Of processor time, and of wall time, for one image."""
MAX_MEMORY = 1 << 30
"""Bytes of a child process, of which some 200 MiB are Python's and Pillow's."""
MAX_OUTPUT = 256 << 20
MAX_PROCESSES = 4

PreparedMedia = PreparedImage | PreparedClip


class ImagePreparer:
    """Decodes images and audio for one model in a few child processes. Thread-safe; calls block."""

    def __init__(self, processor: ImageProcessor, *, max_seconds: float = MAX_SECONDS) -> None:
        self.processor = processor
        self._settings = {"max_seconds": max_seconds, "max_memory": MAX_MEMORY, "max_output": MAX_OUTPUT}
        self.num_processes = max(1, min(MAX_PROCESSES, (os.cpu_count() or 2) // 2))
        self._idle: queue.SimpleQueue[ChildProcess | None] = queue.SimpleQueue()
        for _ in range(self.num_processes):
            self._idle.put(None)  # started when it is needed

    def prepare(self, data: bytes, detail: str, where: str) -> PreparedImage:
        """Prepare the image in a file; ``where`` is its place in the request, for errors.

        Raises ``InvalidParameter``, and ``Unavailable`` if no process can be started now.
        """
        (shape, details), pixels = self._ask(self.processor.settings_for(detail), data, f"'{where}': the image")
        image = PreparedImage(tuple(shape), tuple(details), pixels)
        _ = image.digest  # here, in the caller's thread: some milliseconds
        return image

    def prepare_video(self, files: Sequence[bytes], rate: float | None, where: str) -> PreparedClip:
        """Prepare a video: one file, or frames as images, ``rate`` a second. Raises as ``prepare`` does."""
        form, name = self.processor.video, f"'{where}': the video"
        if form is None:
            raise InvalidParameter("messages", f"'{where}': this model takes no videos.")
        settings = {**form.settings, "group": form.group, "rate": rate, "sizes": [len(file) for file in files]}
        (shape, places, total, frame_rate), pixels = self._ask(settings, b"".join(files), name)
        return self.processor.video_of(Frames(tuple(shape), places, total, frame_rate, pixels))

    def prepare_audio(self, data: bytes, where: str) -> PreparedClip:
        """Prepare the audio in a file. Raises as ``prepare`` does."""
        form = self.processor.audio
        if form is None:
            raise InvalidParameter("messages", f"'{where}': this model takes no audio.")
        settings = {"audio": {"rate": RATE, "most_seconds": form.most_seconds}}
        _, samples = self._ask(settings, data, f"'{where}': the audio")
        clip = self.processor.audio_of(samples)
        _ = clip.images[0].digest  # as for an image
        return clip

    def _ask(self, settings: dict[str, Any], data: bytes, name: str) -> tuple[list[Any], bytes]:
        """A child's answer about files: what is said of the pixels, and these."""
        encoded = json.dumps(settings).encode()
        process = self._idle.get()
        try:
            if process is None or not process.is_alive:
                process = ChildProcess(WORKER, self._settings)
            kind, answer = process.ask_bytes(LENGTH.pack(len(encoded)) + encoded + data)
        except ChildLost as error:
            raise InvalidParameter("messages", f"{name} cannot be decoded: {error}.") from None
        finally:
            self._idle.put(process)
        if kind != RENDERED:
            reason = answer.decode("utf-8", "replace") if kind == REFUSED else "cannot be decoded"
            raise InvalidParameter("messages", f"{name} {reason}.")
        (size,) = LENGTH.unpack_from(answer)
        return json.loads(answer[LENGTH.size : LENGTH.size + size]), answer[LENGTH.size + size :]

    def close(self) -> None:
        """End the processes."""
        for _ in range(self.num_processes):
            process = self._idle.get()
            if process is not None:
                process.close()
            self._idle.put(None)


def from_data_url(url: str, where: str) -> bytes:
    """The content of a data: URL. Raises ``InvalidParameter``."""
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidParameter("messages", f"'{where}' must be a data: URL with base64.")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameter("messages", f"'{where}' has no valid base64.") from None


def read_by_model(prompt: ChatPrompt, media: Mapping[int, PreparedMedia]) -> tuple[ChatPrompt, list[PreparedImage]]:
    """A prompt with what the model reads in place of its videos and audio, and all images in the order of their
    placeholders. ``media``: by number in the conversation."""
    images: list[PreparedImage] = []
    for number in prompt.images:
        found = media[number]
        images += found.images if isinstance(found, PreparedClip) else [found]
    clips = {number: found.written for number, found in media.items() if isinstance(found, PreparedClip)}
    return prompt.with_clips(clips), images


def placed(
    tokens: list[int], images: Sequence[PreparedImage], processor: ImageProcessor
) -> tuple[list[int], list[ImageInput]]:
    """``tokens`` in which the placeholder of each image is as many as it has embeddings, and the images.

    The placeholders are found by id: a client's text has none. Raises ``InvalidParameter`` if their number is another.
    """
    if not images:
        return tokens, []
    of_media = {processor.token_of(image) for image in images}
    places = [place for place, token in enumerate(tokens) if token in of_media]
    if [tokens[place] for place in places] != [processor.token_of(image) for image in images]:
        message = f"The prompt has places for {len(places)} images, and there are {len(images)}."
        raise InvalidParameter("messages", message)
    if processor.is_prefix and len(images) > 1:
        raise InvalidParameter("messages", f"This model reads one image of a prompt; there are {len(images)}.")
    expanded: list[int] = []
    inputs: list[ImageInput] = []
    last = int(processor.is_prefix and tokens[:1] == [processor.vocabulary["<bos>"]])  # that one is behind the image
    for index, (place, image) in enumerate(zip(places, images, strict=True)):
        expanded += tokens[last:place] + processor.number(index)
        inputs.append(processor.placed(image, len(expanded)))
        expanded += processor.tokens(image)
        last = place + 1
    expanded += tokens[last:]
    return expanded, [processor.over(image, expanded) for image in inputs] if processor.is_prefix else inputs


def preparer_of(settings: ModelSettings, num_slots: int) -> ImagePreparer | None:
    """Prepares the images of an engine with so many slots; ``None`` if its model takes none. Raises
    ``CheckpointError``."""
    processor = read_processor(settings.config_folder(resolve_model(settings))) if num_slots else None
    return None if processor is None else ImagePreparer(processor.limited(num_slots))
