"""Compiles the text of a grammar to llguidance's matcher over a vocabulary, in the engine and in the child process.

llguidance parses by Earley's algorithm over a lexer of lazily built derivatives, so most of the work is done when
masks are computed; the limits bound each mask too. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from octavo.errors import failures_as
from octavo.grammar.closing import closed
from octavo.grammar.exact_numbers import MAX_EXACT, Inexact, parts_of_schema
from octavo.grammar.forms import WEAKENS, FormError, Part, parts_of, text_of, weakened_in
from octavo.grammar.schema_patterns import with_formats, with_names
from octavo.grammar.vocabulary import Splitter, Vocabulary

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    max_items_in_row=4_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""A step of the lexer takes under 10 ms on one core, and its states, of up to 2 kB, under 100 MB. A row of the parser
takes up to 5 ms."""
FREE_SECONDS = 0.5
SECONDS_PER_TOKEN = 0.005
"""Processor time for the masks of one text, initially and per token; a grammar that needs more would slow down all
other requests. The test in the child process applies these limits too."""

_MANY_DIGITS = re.compile(r"(?<![\w.])\d{16,400}(?![\d.])")

Mask = npt.NDArray[np.uint8]
"""Bit ``id % 8`` of byte ``id // 8`` says whether a token is allowed."""


class GrammarError(Exception):
    """A grammar that cannot be used; the message continues after a field's name, as in "uses 'not'"."""


class _Wrapped:
    """A vocabulary with the interface that ``LLTokenizer`` expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self._split = Splitter(vocabulary)

    def __call__(self, text: str | bytes) -> list[int]:
        # Called for text that the grammar forces: of all encodings of its bytes, only the model's own is allowed.
        return self._split(text)


def make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The vocabulary as a trie of bytes, shared by all matchers. Raises ``GrammarError`` without end-of-text tokens."""
    if not vocabulary.eos_ids:
        raise GrammarError("cannot be used: the model has no token that ends a text")
    wrapped = _Wrapped(vocabulary)
    return LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_ids)  # type: ignore[arg-type]


def normalised(text: str) -> str:
    """``text`` with every part rewritten to forms that llguidance reads. Raises ``GrammarError``."""
    try:
        parts = [_normalised_part(part, place) for place, part in enumerate(parts_of(text))]
    except (FormError, Inexact) as error:
        raise GrammarError(str(error)) from None
    return text_of([each[0] for each in parts] + [each for further in parts for each in further[1:]], weakened_in(text))


def _normalised_part(part: Part, place: int) -> list[Part]:
    """The part as llguidance reads it, and further parts that it refers to."""
    part = {key: value for key, value in part.items() if key != WEAKENS}
    further: list[Part] = []
    if "schema" in part:
        try:
            found, *further = parts_of_schema(
                with_formats(closed(with_names(part.pop("schema")))), part.get("name", f"p{place}")
            )
        except RecursionError:
            raise GrammarError("is nested too deep") from None
        except (TypeError, ValueError, AttributeError):  # a keyword with a value of another type
            raise GrammarError("cannot be used: it is not a valid JSON schema") from None
        part |= found
    elif "regex" in part:
        # \d matches ASCII digits only, as clients mean it; consumers of the output seldom accept others.
        part["lark_grammar"] = f"start: /{regex_to_lark(part.pop('regex'), 'd')}/"
    elif "gbnf" in part:
        with failures_as(lambda error: GrammarError(f"is not a grammar: {first_line(str(error))}")):
            part["lark_grammar"] = any_to_lark(part.pop("gbnf"))
        _check_inline_schemas(part["lark_grammar"])
    return [part, *further]


def _check_inline_schemas(lark: str) -> None:
    """Raise ``GrammarError`` for numbers beside ``%json`` that llguidance would round; it dies of some with SIGSEGV."""
    if "%json" in lark:
        for number in _MANY_DIGITS.findall(lark):
            if abs(int(number)) > MAX_EXACT:
                raise GrammarError(f"has the number {number[:40]}, and '%json' cannot keep to numbers above 2**53")


def compile_matcher(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A new matcher of a normalised grammar. Raises ``GrammarError``."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    check(matcher)
    fill_mask(matcher, new_mask(tokenizer))  # builds the lexer's first states, where some limits are met first
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raise ``GrammarError`` when the matcher has failed, which is permanent."""
    if matcher.is_error():
        raise GrammarError(describe(matcher.get_error()))


def new_mask(tokenizer: LLTokenizer) -> Mask:
    """A mask that allows no token."""
    return np.zeros((tokenizer.vocab_size + 31) // 32 * 4, dtype=np.uint8)


def fill_mask(matcher: LLMatcher, mask: Mask) -> None:
    """Write the mask of the next token; no bit is set once the matcher has failed."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        mask[:] = 0


def describe(error: str) -> str:
    """llguidance's error as a sentence that follows the name of a field."""
    reason = re.sub(r"^(at )?\d+\(\d+\): ", "", first_line(error)).removeprefix("failed to compile JSON schema: ")
    if found := re.fullmatch(r"Unimplemented keys: \[(.*)\]", reason):
        names = found[1].replace('"', "'")
        return f"uses {names}, which is not supported"
    if found := re.search(r"^error: (.+)$", error, re.MULTILINE):  # of a regular expression, below a drawing of it
        reason = reason.replace("regex parse error:", found[1])
    if reason == "NoExtensionBias":
        return "cannot be used: no text satisfies it"
    if reason.startswith("oneOf constraints are not supported"):
        return "uses 'oneOf' with schemas that are not plainly exclusive, which is not supported"
    return f"cannot be used: {reason}"


def first_line(text: str) -> str:
    """The first line of llguidance's error, without the state dumped behind it."""
    return text.partition("\n")[0][:300]
