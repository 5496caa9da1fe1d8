"""The tokenizer as a whole, and against the reference implementation on the real vocabulary."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.errors import InvalidParameter
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tokenizers.token_bytes import byte_level_alphabet
from octavo.text.tokenizers.tokenizer_parts import wrap_with_special_tokens
from tests.gguf_reference import read_once
from tests.tiers import one_in

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "It's 12:30 and we're 100% sure — aren't we?",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'\n\n\nclass A:\n\tpass\n",
    "for (int i=0;i<10;++i){ a[i] <<= 2; } // done\r\n",
    "😀 👩‍👩‍👧‍👦 👍🏽 🇨🇭 ☃️",
    "中文分词,日本語のテキスト、한국어 문장입니다。",
    "e\u0301 n\u0303 Zalgo: t\u0300\u0301\u0302e\u0316\u0317xt ﬁ,½,Ⅷ,٣,𝟜",
    "a  b   c    d     e\t\tf\n\n\ng  \n  h   ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y <|im_end|> <|im_start <repo_name>",
    "Здравствуй, мир! Γειά σου Κόσμε! שלום עולם مرحبا بالعالم नमस्ते ไทย",
    "\u00a0\u2003\u200b\ufeff\u0000\x1b[0m",
    "CamelCase snake_case SCREAMING_CASE kebab-case a1b2c3 v2.0.1-rc3",
    "https://example.org/a?b=c&d=%20e#f",
    "$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$",
    "ß ẞ İ ı ǆ ſ Å Å",
]
DIGITS_AFTER_SPACES = ["1.\n2.\n\n3.   4", "x  1", "\t\t42\n\n7 8  9", "a = [ 1,  2,   3 ]", " ½ Ⅷ ٣ 𝟜"]


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    with read_once():
        return transformers.AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)


@one_in(3)
@pytest.mark.model
@pytest.mark.parametrize("text", CORPUS)
def test_encoding_equals_the_reference(smollm_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert smollm_tokenizer.encode(text) == reference.encode(text)
    assert smollm_tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@pytest.mark.model
@pytest.mark.parametrize("text", [*DIGITS_AFTER_SPACES, *CORPUS])
def test_digits_are_cut_as_the_model_was_trained(smollm_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    """The file asks for the ``smollm`` rule, every digit a word; the reference reads the file but not that key."""
    backend = reference.backend_tokenizer
    as_read = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        assert smollm_tokenizer.encode(text) == backend.encode(text).ids
    finally:
        backend.pre_tokenizer = as_read


@pytest.mark.model
@pytest.mark.parametrize("text", [*DIGITS_AFTER_SPACES, *CORPUS])
def test_decoding_equals_the_reference(smollm_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    tokens = smollm_tokenizer.encode(text)
    for skip in (True, False):
        assert smollm_tokenizer.decode(tokens, skip) == reference.backend_tokenizer.decode(tokens, skip)
    assert smollm_tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert b"".join(map(smollm_tokenizer.token_bytes, tokens)) == text.encode()


@pytest.mark.model
def test_what_the_real_vocabulary_is(smollm_tokenizer: Tokenizer) -> None:
    assert smollm_tokenizer.vocab_size == 49152
    assert smollm_tokenizer.bos_token_id == 1
    assert smollm_tokenizer.eos_token_ids == (0, 2)
    assert smollm_tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert len(smollm_tokenizer.special_token_ids) == 17
    assert smollm_tokenizer.chat_template is not None
    assert smollm_tokenizer.longest_token_bytes == max(len(smollm_tokenizer.token_bytes(t)) for t in range(49152))


@pytest.mark.timing
@pytest.mark.model
def test_encoding_lets_other_threads_run(smollm_tokenizer: Tokenizer) -> None:
    text = "The quick brown fox. " * 50_000
    ticks, done = [time.perf_counter()], threading.Event()

    def encode() -> None:
        smollm_tokenizer.encode(text)
        done.set()

    start = time.perf_counter()
    worker = threading.Thread(target=encode)
    worker.start()
    while not done.is_set():
        time.sleep(0.001)
        ticks.append(time.perf_counter())
    worker.join()
    # The interpreter is held at most for turning the result into a list.
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 0.7 * (time.perf_counter() - start)


def test_unknown_ids_are_no_text(small_tokenizer: Tokenizer) -> None:
    beyond = small_tokenizer.vocab_size
    assert small_tokenizer.decode([-1, beyond, 10**9]) == ""
    assert small_tokenizer.token_bytes(-1) == b""
    assert small_tokenizer.token_text(beyond) == ""


def test_parts_of_characters_have_names_of_their_own(small_tokenizer: Tokenizer) -> None:
    first, *_ = small_tokenizer.encode("😀")
    assert small_tokenizer.token_text(first) == r"bytes:\xf0\x9f"
    assert small_tokenizer.token_text(2) == "<|im_end|>"
    assert small_tokenizer.token_text(small_tokenizer.encode(" the")[0]) == " the"


def test_an_unpaired_surrogate_is_refused(small_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="Character 2 of the text") as caught:
        small_tokenizer.encode("ab\ud800c")
    assert caught.value.param == "prompt"


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2(3) returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcdefg", "uordblks", "fordblks", "keepcost")]


def allocated() -> int:
    """Bytes allocated outside Python's own allocator, in all threads."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("needs glibc")
    library.mallinfo2.restype = _MallInfo
    return int(library.mallinfo2().uordblks)


@pytest.mark.slow
@pytest.mark.parametrize("model", [models.BPE, models.Unigram])
def test_long_words_do_not_fill_memory(tmp_path: Path, model: type) -> None:
    """The library keeps the tokens of 10,000 words for each thread."""
    alphabet = byte_level_alphabet()
    made = model(alphabet, []) if model is models.BPE else model([(text, -1.0) for text in alphabet], 0, False)
    backend = tokenizers.Tokenizer(made)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    tokenizer.prepare_to_encode()
    words = [f"{number:b}".translate({48: "a", 49: "b"}).rjust(200, "c") for number in range(9000)]
    grown = 0

    def encode() -> None:
        nonlocal grown
        before = allocated()
        for word in words:
            tokenizer.encode(word)
        grown = allocated() - before

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join()
    assert grown < 10 << 20


@pytest.mark.parametrize("text", ["<s:", "$A", "a b", ":1", "eos_token"])
def test_a_special_token_around_texts_may_be_any_text(text: str) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({text: 7, "x": 1}, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    wrap_with_special_tokens(backend, {"bos_token": text, "eos_token": text}, True, True, Path("folder"))
    assert backend.encode("x").ids == [7, 1, 7]
    assert backend.encode("x", "x").tokens == [text, "x", "x", text]


def test_texts_are_encoded_together_up_to_so_many_characters(
    small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.text.tokenizer.CHARACTERS_AT_ONCE", 10)
    texts = ["the TM1", "ab", "T", "", "more than ten", "the"]
    assert small_tokenizer.encode_all(texts) == [small_tokenizer.encode(text) for text in texts]
    assert small_tokenizer.encode_all([]) == []
