"""The images, videos and audio of requests: from a data: URL, an uploaded file or an allowed host to resized pixels.

Nothing is fetched from hosts that ``--allowed-media-domains`` does not name. A name is resolved once, all of its
addresses must be public ones, the connection goes to one of these, and redirects are not followed: so neither a page of
another site nor a name that changes its address makes this server ask a machine of its own network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import re
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from octavo.config import ModelSettings
from octavo.errors import InvalidParameter
from octavo.images.preparer import ImagePreparer, PreparedMedia, from_data_url, placed, preparer_of
from octavo.images.processors import PreparedClip, PreparedImage
from octavo.server_settings import ServerSettings
from octavo.text.chat_messages import KINDS
from octavo.text.conversation import ChatPrompt, ImageText
from octavo.types import ImageInput
from octavo_server.tenants.turn_queue import Places

MOST_PREPARED_BYTES = 48 << 20
"""Of the resized images of a request, which go to the engine process in one message."""
MOST_KEPT_BYTES = 128 << 20
"""Of resized images that are kept, as a conversation brings its images again with each message."""
MOST_FRAMES = 1000
"""Of a video that is given as images."""
FRAMES_URL = "data:video/jpeg;base64,"
"""Begins the URL of a video whose frames are JPEG files in base64, with commas between them, as vLLM takes it."""
FETCH_SECONDS = 10.0
PLAIN_URL = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?(/[!-~]*)?", re.IGNORECASE)
"""Nothing that one parser reads otherwise than another: no user, no backslash, no address in brackets."""
PORTS = {"http": 80, "https": 443}
DETAILS = ("auto", "low", "high", "original")
MARKDOWN_IMAGE = re.compile(r"!\[[^\]\n]*\]\(([^()\s]+)\)")
"""How Text Generation Inference writes an image in a prompt."""

Part = tuple[Mapping[str, Any], str]
"""A part of a message that is an image, a video or audio, and where it is in the request."""
ReadFile = Callable[[str], Awaitable[bytes | None]]
"""Reads a caller's uploaded file by id; ``None`` if there is none."""
Resolve = Callable[[str, int], Awaitable[list[str]]]


class Source(NamedTuple):
    """Where the bytes of an image are."""

    kind: str
    """"data", "url" or "file"."""
    value: str
    detail: str
    where: str


def source_of(part: Part, what: str = "an image") -> Source:
    """Where an image is, of a part in the form of any API. Raises ``InvalidParameter``."""
    given, where = part
    image = given.get("image_url", given.get("image", given.get("source")))
    detail = given.get("detail", "auto")
    if isinstance(image, Mapping):
        detail = image.get("detail", detail)
        given = {**given, "file_id": image.get("file_id", given.get("file_id"))}
        image = image.get("url")
    if detail is None or detail not in DETAILS:
        raise InvalidParameter("messages", f"'{where}': 'detail' must be one of {', '.join(DETAILS)}.")
    if isinstance(image, str) and image[:5].lower() == "data:":
        return Source("data", image, detail, where)
    if isinstance(image, str) and image:
        return Source("url", image, detail, where)
    if isinstance(file_id := given.get("file_id"), str):
        return Source("file", file_id, detail, where)
    raise InvalidParameter("messages", f"'{where}' must have {what}: a data: URL, an https: URL or a 'file_id'.")


def video_sources(part: Part) -> tuple[list[Source], float | None]:
    """Where a video is, or its frames, and how many of these a second has. Raises ``InvalidParameter``."""
    given, where = part
    video = given.get("video_url", given.get("video"))
    if isinstance(video, Mapping):
        given = {**given, **video}
        video = given.get("url")
    rate = given.get("fps", given.get("sample_fps"))
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1000):
        raise InvalidParameter("messages", f"'{where}': 'fps' must be the frames of a second, at most 1000.")
    if isinstance(video, str) and video[: len(FRAMES_URL)].lower() == FRAMES_URL:
        video = [f"data:image/jpeg;base64,{frame}" for frame in video[len(FRAMES_URL) :].split(",")]
    if not isinstance(video, list):
        return [source_of(({"image": video, "file_id": given.get("file_id")}, where), "a video")], rate
    if not 0 < len(video) <= MOST_FRAMES:
        message = f"'{where}': a list of frames may have 1 to {MOST_FRAMES}; this one has {len(video)}."
        raise InvalidParameter("messages", message)
    frames = [source_of(({"image": frame}, f"{where}: frame {place}"), "a frame") for place, frame in enumerate(video)]
    if any(frame.kind == "url" for frame in frames):
        raise InvalidParameter("messages", f"'{where}': frames must be data: URLs or have a 'file_id'.")
    return frames, rate


def audio_source(part: Part) -> Source:
    """Where audio is: ``input_audio`` with its bytes in base64, or ``audio_url``. Raises ``InvalidParameter``."""
    given, where = part
    audio = given.get("input_audio", given.get("audio_url", given.get("audio")))
    if isinstance(audio, Mapping) and isinstance(data := audio.get("data"), str):
        return Source("data", f"data:audio/{audio.get('format') or 'wav'};base64,{data}", "auto", where)
    return source_of(({"image": audio, "file_id": given.get("file_id")}, where), "audio")


def kind_of(part: Part) -> str:
    """Whether a part is an "image", a "video" or "audio"; TGI's images in texts have no type."""
    return KINDS.get(str(part[0].get("type")), "image")


class MarkedText:
    """A text of a client with images, for models whose prompts have images anywhere."""

    def __init__(self, text: str, image_text: ImageText, field: str) -> None:
        pieces = MARKDOWN_IMAGE.split(text)
        self.images: list[Part] = [({"image_url": url}, f"{field}: image {i}") for i, url in enumerate(pieces[1::2])]
        self._text = "".join(image_text.alone if i % 2 else piece for i, piece in enumerate(pieces))

    def __call__(self) -> ChatPrompt:
        return ChatPrompt(self._text, self._text, images=tuple(range(len(self.images))))


class KeptImages:
    """The images and audio that were prepared last, by who sent them: how soon an answer comes tells nobody what others
    sent."""

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most, self._num_bytes = most_bytes, 0
        self._images: OrderedDict[tuple[str, str, bytes], PreparedMedia] = OrderedDict()

    async def prepared(
        self,
        owner: str,
        source: Source,
        read: Callable[[], Awaitable[bytes]],
        prepare: Callable[[bytes], PreparedMedia],
    ) -> PreparedMedia:
        """The image or audio of a source, prepared unless it is kept; ``read`` gives its bytes. A data: URL that is
        known is not decoded. Raises as ``read`` and ``prepare``, which is called in a thread, do."""
        given = source.value if source.kind == "data" else await read()
        digest = await asyncio.to_thread(_digest, given)
        key = owner, source.detail, digest
        if key in self._images:
            self._images.move_to_end(key)
            return self._images[key]
        data = await read() if isinstance(given, str) else given
        image = await asyncio.to_thread(prepare, data)
        if key not in self._images:  # else it came twice at once
            self._images[key] = image
            self._num_bytes += num_bytes_of(image)
            while self._num_bytes > self._most:
                self._num_bytes -= num_bytes_of(self._images.popitem(last=False)[1])
        return image


def num_bytes_of(media: PreparedMedia) -> int:
    """The bytes of an image, or of all that a video or audio has."""
    return sum(len(image.pixels) for image in (media.images if isinstance(media, PreparedClip) else [media]))


def _digest(content: str | bytes) -> bytes:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).digest()


class ImageFiles:
    """Gets and prepares the images of one model's requests."""

    def __init__(
        self,
        model: ModelSettings,
        settings: ServerSettings,
        num_slots: Callable[[], int],
        resolve: Resolve | None = None,
    ) -> None:
        """``num_slots``: those of the engine, known once it is ready; 0: its model takes no images."""
        self._model, self._num_slots = model, num_slots
        self._most_images, self._most_bytes = settings.max_images, settings.max_image_bytes
        names = (settings.allowed_media_domains or "").split(",")
        self._hosts = frozenset(name.strip().lower() for name in names if name.strip())
        self._resolve = resolve or _resolved
        self._preparer: ImagePreparer | None = None
        self._is_read = False
        self._kept = KeptImages()
        self._places = Places(4, 2)

    @property
    def preparer(self) -> ImagePreparer | None:
        """``None`` for a model that takes no images."""
        if not self._is_read and self._num_slots():
            self._is_read, self._preparer = True, preparer_of(self._model, self._num_slots())
        return self._preparer

    @property
    def image_text(self) -> ImageText | None:
        """How the model's prompts have images; ``None`` if it takes none."""
        return None if self.preparer is None else self.preparer.processor.image_text

    async def prepare(self, parts: Sequence[Part], owner: str, read_file: ReadFile | None) -> list[PreparedMedia]:
        """The images and videos, resized, and audio, in the order of ``parts``. Raises ``RequestError``."""
        preparer = self.preparer
        assert preparer is not None, "only models with a tower have parts that are images"
        if len(parts) > self._most_images:
            message = f"A request may have {self._most_images} images, videos or audio; this one has {len(parts)}."
            raise InvalidParameter("messages", message)
        found: list[PreparedMedia] = []
        num_bytes, num_images = 0, sum(kind_of(part) == "image" for part in parts)
        for part in parts:
            async with self._places.place(owner):
                media = await self._prepared(preparer, part, num_images, owner, read_file)
            num_bytes += num_bytes_of(media)
            if num_bytes > MOST_PREPARED_BYTES:
                what = "images" if num_images else "videos and audio"
                message = (
                    f"The {what} of the request have more than {MOST_PREPARED_BYTES >> 20} MiB once they are read."
                )
                raise InvalidParameter("messages", message)
            found.append(media)
        return found

    async def _prepared(
        self, preparer: ImagePreparer, part: Part, num_images: int, owner: str, read_file: ReadFile | None
    ) -> PreparedMedia:
        kind = kind_of(part)
        if kind != "video":
            source = source_of(part) if kind == "image" else audio_source(part)
            detail = preparer.processor.detail_of(source.detail, num_images) if kind == "image" else kind
            return await self._kept.prepared(
                owner,
                source._replace(detail=detail),
                lambda: self._content(source, read_file),
                lambda data: (
                    preparer.prepare(data, detail, source.where)
                    if kind == "image"
                    else preparer.prepare_audio(data, source.where)
                ),
            )
        sources, rate = video_sources(part)
        files = [await self._content(source, read_file) for source in sources]
        if (num_bytes := sum(map(len, files))) > self._most_bytes:
            message = f"'{part[1]}': the video has {num_bytes} bytes; at most {self._most_bytes} are allowed."
            raise InvalidParameter("messages", message)
        return await asyncio.to_thread(preparer.prepare_video, files, rate, part[1])

    def placed(self, tokens: list[int], images: Sequence[PreparedImage]) -> tuple[list[int], list[ImageInput]]:
        """See ``images.preparer.placed``."""
        assert self.preparer is not None
        return placed(tokens, images, self.preparer.processor)

    def close(self) -> None:
        """End the child processes."""
        if self._preparer is not None:
            self._preparer.close()

    async def _content(self, source: Source, read_file: ReadFile | None) -> bytes:
        """The bytes of a file. Raises ``InvalidParameter``."""
        if source.kind == "data":
            data = await asyncio.to_thread(from_data_url, source.value, source.where)
        elif source.kind == "file":
            content = None if read_file is None else await read_file(source.value)
            if content is None:
                raise InvalidParameter("messages", f"'{source.where}': there is no file with this 'file_id'.")
            data = content
        else:
            data = await self._fetched(source)
        if len(data) > self._most_bytes:
            message = f"'{source.where}': the file has {len(data)} bytes; at most {self._most_bytes} are allowed."
            raise InvalidParameter("messages", message)
        return data

    # ---- other hosts

    async def _fetched(self, source: Source) -> bytes:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._fetch(source)
        except (TimeoutError, OSError, httpx.HTTPError, ValueError) as error:
            if isinstance(error, InvalidParameter):
                raise
            reason = f"{type(error).__name__}"
            raise InvalidParameter("messages", f"'{source.where}': the file cannot be fetched ({reason}).") from None

    async def _fetch(self, source: Source) -> bytes:
        host, port, scheme = self._allowed(source)
        address = await self._address(host, port, source)
        url = httpx.URL(source.value).copy_with(host=address, port=port, scheme=scheme)
        headers = {"host": host if port == PORTS[scheme] else f"{host}:{port}", "accept": "image/*, video/*, audio/*"}
        timeout = httpx.Timeout(FETCH_SECONDS)
        async with httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=timeout) as client:
            request = client.build_request("GET", url, headers=headers, extensions={"sni_hostname": host})
            async with contextlib.aclosing(_pieces(await client.send(request, stream=True), source)) as pieces:
                data = bytearray()
                async for piece in pieces:
                    data += piece
                    if len(data) > self._most_bytes:
                        message = f"'{source.where}': the file has more than {self._most_bytes} bytes."
                        raise InvalidParameter("messages", message)
        return bytes(data)

    def _allowed(self, source: Source) -> tuple[str, int, str]:
        """Host, port and scheme of a URL, if its host is allowed. Raises ``InvalidParameter``."""
        where = source.where
        if not self._hosts:
            message = (
                f"'{where}': this server fetches no files; send a data: URL, or start it with --allowed-media-domains."
            )
            raise InvalidParameter("messages", message)
        if not PLAIN_URL.fullmatch(source.value):
            raise InvalidParameter("messages", f"'{where}': the file must have a plain http: or https: URL.")
        parts = urlsplit(source.value)
        host, scheme = (parts.hostname or "").lower(), parts.scheme.lower()
        try:
            port = parts.port or PORTS[scheme]
        except ValueError:
            raise InvalidParameter("messages", f"'{where}': the URL has no valid port.") from None
        name = host if port == PORTS[scheme] else f"{host}:{port}"
        if name not in self._hosts:
            message = f"'{where}': files from this host are not allowed; allowed are {', '.join(sorted(self._hosts))}."
            raise InvalidParameter("messages", message)
        return host, port, scheme

    async def _address(self, host: str, port: int, source: Source) -> str:
        """An address of the host, of which all must be public ones. Raises ``InvalidParameter``."""
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise InvalidParameter("messages", f"'{source.where}': the host has no public address.")
        return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, also where one kind of address holds another."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        is_translated = found in ipaddress.ip_network("64:ff9b::/96")
        if is_translated or any(each is not None for each in inner):
            return False
    return found.is_global and not found.is_multicast


async def _resolved(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


async def _pieces(response: httpx.Response, source: Source) -> AsyncGenerator[bytes]:
    """The body of an answer, undecoded. Raises ``InvalidParameter`` for any status but 200."""
    try:
        if response.status_code != 200:
            message = f"'{source.where}': the host answers {response.status_code}; redirects are not followed."
            raise InvalidParameter("messages", message)
        async for piece in response.aiter_raw():
            yield piece
    finally:
        await response.aclose()
