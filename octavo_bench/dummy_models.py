"""Model folders without weights: a public model's shape and a made-up tokenizer of its full vocabulary.

``--load-format dummy`` fills in random weights. With these, an engine and a peer can be measured at a real
model's size where no checkpoint can be had. The shapes are those of the models' published ``config.json``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.errors import ConfigError
from octavo_fleet.sim.shapes import SHAPES

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(name: str, folder: Path) -> Path:
    """Write ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` of a shape; returns the folder.

    Raises ``ConfigError`` for a name that is not in ``SHAPES``, or a folder that cannot be made.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape: {name!r} is not one of {', '.join(SHAPES)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder: {folder} cannot be made: {error.strerror}") from None
    config = dict(SHAPES[name])
    end_of_text = config["vocab_size"] - len(SPECIAL_TOKENS)
    config |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return folder


def model_folder(model: str, root: Path) -> Path:
    """A folder that exists, as it is; a shape's name, written under ``root``. Raises ``ConfigError`` for others."""
    return Path(model) if Path(model).is_dir() else write_model(model, root / model)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly ``vocab_size`` tokens.

    The 256 bytes and the special tokens aside, all are syllables and, far more, words of one to three syllables
    with a space before them. So nearly every sequence of ids is the encoding of its own text, as clients that make
    up prompts of a given length need.
    """
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    room = vocab_size - len(SPECIAL_TOKENS) - len(tokens)
    for left, right in itertools.islice(_word_parts(), max(room, 0)):
        merges.append((left, right))
        tokens.append(left + right)
    if len(merges) != room:
        raise ConfigError(f"vocab_size: {vocab_size} is less than the bytes need, or more than there are words")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def _word_parts() -> Iterator[tuple[str, str]]:
    """Merges in order: syllables, a space and a syllable, then longer words from those before them."""
    syllables = [c + v for c in "bcdfghjklmnpqrstvwxz" for v in "aeiouy"]
    yield from ((syllable[0], syllable[1]) for syllable in syllables)
    yield from (("Ġ", syllable) for syllable in syllables)
    for length in (1, 2):
        for *start, last in itertools.product(syllables, repeat=length + 1):
            yield "Ġ" + "".join(start), last
