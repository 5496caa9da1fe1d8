"""Where the images, videos and audio of messages are: in data: URLs, in uploaded files, or on hosts that are allowed.

Nothing is fetched from other hosts. A name is resolved once, all of its addresses must be public ones, the connection
goes to one of these, and redirects are not followed: so neither a page of another site nor a name that changes its
address makes this machine ask one of its own network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from octavo.errors import InvalidParameter
from octavo.text.chat_messages import KINDS

MOST_FRAMES = 1000
"""Of a video that is given as images."""
FRAMES_URL = "data:video/jpeg;base64,"
"""Begins the URL of a video whose frames are JPEG files in base64, with commas between them, as vLLM takes it."""
FETCH_SECONDS = 10.0
PLAIN_URL = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?(/[!-~]*)?", re.IGNORECASE)
"""Nothing that one parser reads otherwise than another: no user, no backslash, no address in brackets."""
PORTS = {"http": 80, "https": 443}
DETAILS = ("auto", "low", "high", "original")

Part = tuple[Mapping[str, Any], str]
"""A part of a message that is an image, a video or audio, and where it is in the request."""
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


class MediaHosts:
    """The hosts from which files are fetched, of at most so many bytes."""

    def __init__(self, names: str | None, most_bytes: int, resolve: Resolve | None = None) -> None:
        """``names``: with commas between them, as in ``--allowed-media-domains``."""
        given = (name.strip().lower() for name in (names or "").split(","))
        self._hosts, self._most_bytes = frozenset(filter(None, given)), most_bytes
        self._resolve = resolve or _resolved

    async def fetched(self, source: Source) -> bytes:
        """The file at the URL of a source. Raises ``InvalidParameter``."""
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
