r"""Pre-tokenizers of byte-level vocabularies: how text is split into words before merging.

The names are values of ``tokenizer.ggml.pre`` in GGUF files; each is the rule that a model was trained with.
A wrong rule gives plausible but wrong tokens, so unknown names are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import CheckpointError

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
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

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
    "glm4": WordRule((_LLAMA3,)),
    "chatglm-bpe": WordRule((_LLAMA3,)),
    "deepseek-llm": WordRule(_DEEPSEEK_LLM),
    "deepseek-coder": WordRule(_DEEPSEEK_CODER),
    "deepseek-v3": WordRule(_DEEPSEEK_V3),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "qwen35": WordRule((_QWEN35,), compose=True),
    "kimi-k2": WordRule((_KIMI,)),
    "tekken": WordRule((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": WordRule((_GPT4O,)),
    "llama4": WordRule((_GPT4O,)),
}


def word_rule(name: str, origin: object) -> WordRule:
    """The rule called ``name``; raise ``CheckpointError`` for an unknown name."""
    if name not in WORD_RULES:
        raise CheckpointError(f"{origin}: tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted(WORD_RULES))}")
    return WORD_RULES[name]
