"""``tokenizer.model``."""

from __future__ import annotations

import contextlib

from octavo.errors import CheckpointError, InvalidParameter
from octavo.text.tokenizer import load_tokenizer
from tests.fuzz.target import Target
from tests.text.test_sentencepiece_model import trained


def make() -> Target:
    return SentencePiece()


class SentencePiece(Target):
    seeds = [trained(kind) for kind in ("llama", "unigram")]
    words = (
        b"\x0a\x05\x0a\x01a\x18\x01",
        b"\xe2\x96\x81",
        b"\x12\x04\x00\x00\x00\x00",
        b"<0x00>",
        b"\xff\xff\xff\xff\x0f",
    )

    def read(self, data: bytes) -> None:
        (self.folder / "tokenizer.model").write_bytes(data)
        with contextlib.suppress(CheckpointError):
            if (tokenizer := load_tokenizer(self.folder)) is not None:
                with contextlib.suppress(InvalidParameter):  # the library fails with this text
                    tokenizer.encode("Hi, you. \u4e2d")
