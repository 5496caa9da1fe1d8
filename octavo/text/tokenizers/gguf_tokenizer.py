"""Build a tokenizer from the metadata of a GGUF file (keys: ``docs/gguf.md`` in the ggml project).

Byte-level vocabularies come with a pre-tokenizer, which says how text is split into words before merging:
``tokenizer.ggml.pre`` names the rule that a model was trained with. A wrong rule gives plausible but wrong tokens, so
unknown names are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import CheckpointError, failures_as
from octavo.text.tokenizers.sentencepiece_model import NORMAL, SentencePieceVocab, space_marks, text_decoder
from octavo.text.tokenizers.tokenizer_parts import TokenizerParts, wrap_with_special_tokens
from octavo.weights.generation_config import in_vocabulary, token_ids
from octavo.weights.gguf.gguf_reader import GGUFFile

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_CONTRACTION, _LETTERS, r"\p{N}{1,3}", _MARKS, _SPACES))
_QWEN2 = "|".join((_CONTRACTION, _LETTERS, r"\p{N}", _MARKS, _SPACES))
_QWEN35 = "|".join(
    (_CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES)
)
_TEKKEN = "|".join((_LOWER_WORD, _UPPER_WORD, r"\p{N}", _MARKS_AND_SLASHES, _SPACES))
_GPT4O = "|".join(
    (f"{_LOWER_WORD}{_CONTRACTION}?", f"{_UPPER_WORD}{_CONTRACTION}?", r"\p{N}{1,3}", _MARKS_AND_SLASHES, _SPACES)
)
_JAIS2_SPACES = (*(rf"\s{{{1 << bits}}}(?!\S)" for bits in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s")
_JAIS2 = "|".join((_CONTRACTION, _LETTERS, r"\p{N}{1,3}", _MARKS, r"\s*[\r\n]+", *_JAIS2_SPACES))
_KIMI_UPPER, _KIMI_LOWER = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = "|".join(
    (
        r"\p{Han}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?",
        r"\p{N}{1,3}",
        _MARKS,
        _SPACES,
    )
)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SEED = "|".join((_CONTRACTION, _LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES))
_EXAONE_MOE = "|".join(
    (
        _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_BAILING = "|".join((r"'(?i:[sdmt]|ll|ve|re)", _LETTERS, r"\p{N}", _MARKS, r"\s*[\r\n]|\s+(?!\S)|\s+"))
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_HAN = r"[一-龥ࠀ-一가-퟿]+"
_CASED = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹ"
    r"ℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""The cased letters that DeepSeek's first tokenizer lists; easily confused ones are escaped."""
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _SPACES,
)
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
    r"\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
"""Scripts of eastern Asia."""
_AFMOE = (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, "|".join(_DEEPSEEK_V3_WORDS))
_DEEPSEEK_V3 = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", "|".join(_DEEPSEEK_V3_WORDS))


@dataclass(frozen=True)
class WordRule:
    """``patterns`` split the text in order, each applied to the pieces that the previous one left."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """Whether a word in the vocabulary is one token, regardless of the merges (``ignore_merges``)."""
    add_bos: bool = False
    """Default of ``add_bos_token`` when the file has no such key."""
    compose: bool = False
    """Whether text is normalised to Unicode NFC first."""

    def pre_tokenizer(self, add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        spell = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, spell])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.compose else None


_GPT2_RULE = WordRule((_GPT2,))
_DIGITS_RULE = WordRule((r"\p{N}", _GPT2))
_LLAMA3_RULE = WordRule((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_RULE = WordRule((_QWEN2,), compose=True)

WORD_RULES = {
    "default": WordRule(_DEFAULT),
    "gpt-2": _GPT2_RULE,
    "gpt2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "falcon-h1": _LLAMA3_RULE,
    "lfm2": _LLAMA3_RULE,
    "midm-2.0": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "smaug-bpe": WordRule((_LLAMA3,)),
    "dbrx": WordRule((_LLAMA3,)),
    "glm4": WordRule((_LLAMA3,), whole_words=True),
    "glm5": WordRule((_LLAMA3,), whole_words=True),
    "minicpm5": WordRule((r"\p{N}{1,3}", _LLAMA3), whole_words=True),
    "chatglm-bpe": WordRule((_LLAMA3,)),
    "deepseek-llm": WordRule(_DEEPSEEK_LLM),
    "deepseek-coder": WordRule(_DEEPSEEK_CODER),
    "deepseek-v3": WordRule(_DEEPSEEK_V3),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "qwen35": WordRule((_QWEN35,), compose=True),
    "kimi-k2": WordRule((_KIMI,)),
    "tekken": WordRule((_TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), WordRule((_GPT4O,))),
    **dict.fromkeys(("exaone4", "granite-docling", "jais", "trillion", "gigachat", "a.x-4.0", "mellum"), _GPT2_RULE),
    **dict.fromkeys(("command-r", "exaone", "minerva-7b", "mellum2"), _DIGITS_RULE),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "megrez", "kormo", "grok-2"), WordRule((_QWEN2,))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), WordRule((_BAILING,))),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), WordRule((_BLOOM,))),
    "viking": WordRule((_BLOOM, r"\p{N}")),
    "hunyuan-dense": WordRule(_DEEPSEEK_V3),
    "afmoe": WordRule(_AFMOE),
    "jais-2": WordRule((_JAIS2,)),
    "laguna": WordRule((r"[^\n]+|\n+", _QWEN2)),
    "joyai-llm": WordRule(_DEEPSEEK_V3),
    "falcon": WordRule(_FALCON),
    "seed-coder": WordRule((_SEED,)),
    "exaone-moe": WordRule((_EXAONE_MOE,)),
    **dict.fromkeys(("cohere2moe", "tiny_aya"), WordRule((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
}


def word_rule(name: str, origin: object) -> WordRule:
    """The rule called ``name``; raise ``CheckpointError`` for an unknown name."""
    if name not in WORD_RULES:
        raise CheckpointError(f"{origin}: tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted(WORD_RULES))}")
    return WORD_RULES[name]


_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_parts(file: Path) -> TokenizerParts | None:
    """The tokenizer inside ``file``, or ``None`` if it has none; raise ``CheckpointError`` for a bad one."""
    return parts_from_metadata(GGUFFile.open(file).metadata, file)


def parts_from_metadata(metadata: dict[str, Any], origin: Path) -> TokenizerParts | None:
    """The tokenizer that GGUF ``metadata`` describes; ``origin`` is named in errors."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    reader = _Metadata(metadata, origin)
    if kind == "gpt2":
        backend, adds_bos = _byte_level(reader)
    elif kind in ("llama", "gemma4"):
        backend, adds_bos = _sentencepiece(reader, has_merges=kind == "gemma4"), True
    else:
        known = "'gpt2', 'llama' and 'gemma4'"
        raise CheckpointError(f"{origin}: tokenizer.ggml.model is {kind!r}; only {known} can be handled")
    reader.pieces(None).add_to(backend, _takes_blanks(reader, kind))
    special_tokens = reader.special_tokens()
    add_bos = reader.flag("add_bos_token", adds_bos and "bos_token" in special_tokens)
    wrap_with_special_tokens(backend, special_tokens, add_bos, reader.flag("add_eos_token", False), origin)
    template, tool_template = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_template.tool_use")
    return TokenizerParts(
        origin=origin,
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=tuple(sorted({i for key in _END_KEYS if (i := reader.token_id(key)) is not None})),
        chat_template=template if isinstance(template, str) else None,
        tool_template=tool_template if isinstance(tool_template, str) else None,
    )


class _Metadata:
    """The ``tokenizer.ggml.*`` keys of a file, validated on access."""

    def __init__(self, metadata: dict[str, Any], origin: Path) -> None:
        self._metadata = metadata
        self.origin = origin
        self.architecture = metadata.get("general.architecture")
        self.tokens: list[str] = self.strings("tokens")
        self.types: list[int] = [int(t) for t in self.numbers("token_type", len(self.tokens), default=NORMAL)]

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: tokenizer.ggml.{key}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of strings is needed")
        return value

    def numbers(self, key: str, length: int, default: float | None = None) -> Sequence[float]:
        value = self.get(key)
        if value is None and default is not None:
            return [default] * length
        if value is None or isinstance(value, (str, int, float)) or len(value) != length:
            raise self.fail(key, f"a list of {length} numbers is needed")
        return [float(item) for item in value]

    def pieces(self, unknown: str | None) -> SentencePieceVocab:
        """The vocabulary; scores are used, and required, by SentencePiece models only."""
        default = 0.0 if self.get("model") == "gpt2" else None
        scores = [float(score) for score in self.numbers("scores", len(self.tokens), default)]
        return SentencePieceVocab(self.tokens, scores, self.types, unknown, self.fail)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def token_id(self, key: str) -> int | None:
        """The id of a special token; none, with a warning, if it is not in the vocabulary."""
        where = f"tokenizer.ggml.{key}"
        found = in_vocabulary(token_ids(self._metadata, where, str(self.origin)), len(self.tokens), where)
        return found[0] if found else None

    def special_tokens(self) -> dict[str, str]:
        ids = {name: self.token_id(key) for name, key in _SPECIAL_KEYS.items()}
        return {name: self.tokens[index] for name, index in ids.items() if index is not None}


def _byte_level(reader: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE with the merges of the file; and whether it begins texts with BOS by default."""
    rule = word_rule(reader.get("pre", "default"), reader.origin)
    merges = [_pair(merge, reader) for merge in reader.strings("merges")]
    vocabulary = {token: index for index, token in enumerate(reader.tokens)}
    model = _bpe(reader, vocabulary, merges, ignore_merges=rule.whole_words)
    return byte_level(model, rule, reader.flag("add_space_prefix", False)), rule.add_bos


def byte_level(model: models.BPE, rule: WordRule, add_prefix_space: bool) -> tokenizers.Tokenizer:
    """The tokenizer of a model whose tokens spell bytes."""
    backend = tokenizers.Tokenizer(model)
    if rule.compose:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.pre_tokenizer(add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str, reader: _Metadata) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise reader.fail("merges", f"{merge!r} is not two pieces with a space between")
    return left, right


def _bpe(reader: _Metadata, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    with failures_as(lambda error: reader.fail("merges", str(error))):
        return models.BPE(vocab=vocabulary, merges=merges, **options)


def _sentencepiece(reader: _Metadata, has_merges: bool) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, with byte fallback for characters without a piece; ``has_merges``: by the merges of the file
    instead of scores."""
    unknown = reader.token_id("unknown_token_id")
    pieces = reader.pieces(None if unknown is None else reader.tokens[unknown])
    has_bytes = {f"<0x{byte:02X}>" for byte in range(256)}.issubset(pieces.tokens)
    if has_merges:
        merges = [_pair(merge, reader) for merge in reader.strings("merges")]
        vocabulary = {token: index for index, token in enumerate(reader.tokens)}
        options = {"unk_token": pieces.unknown, "fuse_unk": True, "byte_fallback": has_bytes}
        backend = tokenizers.Tokenizer(_bpe(reader, vocabulary, merges, **options))
    else:
        backend = tokenizers.Tokenizer(pieces.bpe(has_bytes))
    # As in llama.cpp, what follows a special token begins with a space too.
    has_prefix = reader.flag("add_space_prefix", not has_merges)
    backend.normalizer = normalizers.Sequence(space_marks(has_prefix))
    backend.decoder = text_decoder(has_prefix)
    return backend


def _takes_blanks(reader: _Metadata, kind: str) -> Callable[[str], bool]:
    """Phi-3's turn markers absorb the whitespace behind them, which no key of the file states."""
    if kind != "llama" or reader.architecture != "phi3":
        return lambda token: False
    return lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")
