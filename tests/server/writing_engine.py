"""An engine whose model has random logits and is in a hurry: it writes what the grammars of its requests allow."""

from __future__ import annotations

import random

from octavo.grammar.matchers import compile_matcher, fill_mask, make_tokenizer, new_mask
from octavo.text.tokenizer import Tokenizer
from octavo.types import Request
from tests.grammar.walks import BLANKS, HURRY, allowed
from tests.server.in_process import EOS, IM_END, InProcessEngine


def writing_engine(tokenizer: Tokenizer) -> InProcessEngine:
    """An engine for requests that have a grammar, over the bytes of ``tokenizer``."""
    ids = {tokenizer.encode(chr(byte), False)[0]: byte for byte in range(128)}
    matchers = make_tokenizer(tokenizer.vocabulary((EOS,)))
    written: dict[int, list[int]] = {}

    def write(request: Request) -> list[int]:
        rng = random.Random(request.seed)
        assert request.params.grammar is not None
        matcher = compile_matcher(request.params.grammar, matchers)
        mask = new_mask(matchers)
        tokens: list[int] = []
        while len(tokens) < request.max_tokens:
            fill_mask(matcher, mask)
            free = allowed(mask)
            weights = [_weight(token, ids.get(token)) for token in free]
            (token,) = rng.choices(free, weights)
            tokens.append(token)
            if token in (EOS, IM_END):
                break
            assert matcher.consume_token(token)
        return tokens

    def answer(request: Request) -> list[int]:
        if request.id not in written:
            written[request.id] = write(request)
        return written[request.id]

    return InProcessEngine(answer)


def _weight(token: int, byte: int | None) -> float:
    if token in (EOS, IM_END):
        return 40.0
    if byte is None:
        return 20.0 if token > IM_END else 0.1
    return 0.05 if byte in BLANKS else HURRY.get(byte, 1.0)
