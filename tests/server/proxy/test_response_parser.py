"""The parser of upstream responses: what it takes, what it refuses, and what a connection is good for afterwards."""

from __future__ import annotations

import pytest

from octavo_fleet.proxy.response_parser import MAX_HEAD_BYTES, MAX_HEADERS, InvalidResponse, ResponseParser

OK = b"HTTP/1.1 200 OK\r\n"
EMPTY = b"content-length: 0\r\n\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def parsed(data: bytes, size: int = 1 << 18) -> ResponseParser:
    """What is read of ``data`` that arrives in pieces of ``size``."""
    parser = ResponseParser()
    for start in range(0, len(data), size):
        parser.feed(data[start : start + size])
    return parser


@pytest.mark.parametrize("size", [1, 7, 1 << 18])
@pytest.mark.parametrize(
    ("data", "body", "may_keep_alive"),
    [
        (OK + b"content-length: 3\r\n\r\nabc", b"abc", True),
        (CHUNKED + b"3;x=y\r\nabc\r\n0\r\nt: trailer\r\n\r\n", b"abc", True),
        (OK + b"connection: close\r\ncontent-length: 3\r\n\r\nabc", b"abc", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc", False),
        (b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 E\r\nlink: x\r\n\r\n" + OK + b"content-length: 1\r\n\r\na", b"a", True),
        (b"HTTP/1.1 204 N\r\n\r\n", b"", True),
        # What follows a response is not read, and its connection is not used again.
        (OK + b"content-length: 1\r\n\r\na" + OK + EMPTY, b"a", False),
        (OK + b"content-length: 1\r\n\r\nagarbage", b"a", False),
        (b"HTTP/1.1 204 N\r\ncontent-length: 5\r\n\r\nhello", b"", False),
    ],
)
def test_a_complete_response(data: bytes, body: bytes, may_keep_alive: bool, size: int) -> None:
    parser = parsed(data, size)
    assert (parser.is_complete, parser.take()) == (True, body)
    assert parser.may_keep_alive == may_keep_alive
    assert not any(name == b"t" for name, _ in parser.headers)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    parser = parsed(OK + b"\r\nabc")
    assert not parser.is_complete
    parser.end()
    assert (parser.is_complete, parser.take(), parser.may_keep_alive) == (True, b"abc", False)
    cut = parsed(OK + b"content-length: 9\r\n\r\nabc")
    cut.end()
    assert not cut.is_complete


REFUSED = {
    "both lengths": OK + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
    "both lengths, the other first": OK + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
    "two lengths": OK + b"content-length: 3\r\ncontent-length: 3\r\n\r\n",
    "a list of lengths": OK + b"content-length: 3, 3\r\n\r\n",
    "a negative length": OK + b"content-length: -3\r\n\r\n",
    "a length too large": OK + b"content-length: 99999999999999999999999\r\n\r\n",
    "an empty length": OK + b"content-length:\r\n\r\n",
    "two encodings": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "gzip and chunked": OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
    "chunked and gzip": OK + b"transfer-encoding: chunked, gzip\r\n\r\n",
    "an unknown encoding": OK + b"transfer-encoding: xchunked\r\n\r\n",
    "chunks of HTTP/1.0": b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    "no chunk size": CHUNKED + b"zz\r\n",
    "a negative chunk size": CHUNKED + b"-1\r\n",
    "a chunk size too large": CHUNKED + b"f" * 17 + b"\r\n",
    "a chunk with an end elsewhere": CHUNKED + b"1\r\nabc\r\n",
    "a folded header": OK + b"x: a\r\n b\r\n" + EMPTY,
    "a header without a colon": OK + b"x\r\n" + EMPTY,
    "a control character in a header": OK + b"x: a\x01\r\n" + EMPTY,
    "a null in a header": OK + b"x: a\0b\r\n" + EMPTY,
    "line feeds alone": b"HTTP/1.1 200 OK\nx: a\n\n",
    "a space before a colon": OK + b"transfer-encoding : chunked\r\n\r\n",
    "status 999": b"HTTP/1.1 999 X\r\n" + EMPTY,
    "status 099": b"HTTP/1.1 099 X\r\n" + EMPTY,
    "status 600": b"HTTP/1.1 600 X\r\n" + EMPTY,
    "an upgrade": b"HTTP/1.1 101 S\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    "an upgrade without a name": b"HTTP/1.1 101 S\r\n\r\n",
    "HTTP/2.0": b"HTTP/2.0 200 OK\r\n" + EMPTY,
    "HTTP/0.9": b"HTTP/0.9 200 OK\r\n" + EMPTY,
    "no HTTP": b"\x16\x03\x01\x02\x00",
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "interim responses": b"HTTP/1.1 100 C\r\n\r\n" * 11,
    "too many headers": OK + b"a:\r\n" * (MAX_HEADERS + 2),
    "headers of interim responses": b"".join(b"HTTP/1.1 103 E\r\n" + b"a:\r\n" * 20 + b"\r\n" for _ in range(6)),
    "headers too large": OK + b"".join(b"x-%d: %b\r\n" % (i, b"x" * 1000) for i in range(80)),
    "a header too large": OK + b"x: " + b"x" * (MAX_HEAD_BYTES + 1),
    "a name too large": OK + b"x" * (MAX_HEAD_BYTES + 1),
    "trailers": CHUNKED + b"0\r\n" + b"a:\r\n" * (MAX_HEADERS + 2),
    "a chunk extension": CHUNKED + b"1;" + b"x" * (1 << 19),
    "a reason": b"HTTP/1.1 200 " + b"x" * (MAX_HEAD_BYTES + 1),
}


@pytest.mark.parametrize("size", [1009, 1 << 18])
@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_response(name: str, size: int) -> None:
    with pytest.raises(InvalidResponse):
        parsed(REFUSED[name], size)


def test_what_arrived_before_the_fault_remains() -> None:
    parser = ResponseParser()
    with pytest.raises(InvalidResponse):
        parser.feed(CHUNKED + b"3\r\nabc\r\nzz\r\n")
    assert (parser.has_head, parser.is_complete, parser.take()) == (True, False, b"abc")
