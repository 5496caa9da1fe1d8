"""Model folders of a public model's shape, with a made-up tokenizer of its full vocabulary and, if asked, weights.

``--load-format dummy`` fills in random weights. With these, an engine and a peer can be measured at a real
model's size where no checkpoint can be had. The shapes are those of the models' published ``config.json``.

Random weights in a checkpoint let two engines serve the same. With ``--load-format dummy`` each makes its own, and a
mixture's router may send tokens to few experts in one engine and to all of them in the other, which read unlike amounts
of memory in a step.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.errors import CheckpointError, ConfigError
from octavo.models.meta_model import Outline
from octavo.models.registry import load_model, read_config
from octavo.quant.checkpoint_tensors import Part
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.dummy import DummyCheckpoint
from octavo.weights.safetensors import read_configs
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


SHARD_BYTES = 4 << 30
EXPONENT = 127 - 7
"""Of all blocks: random codes of FP4 have a standard deviation of 2.9, times 2 ** -7 that is 0.023."""


class ShapeRecorder(Outline):
    """Notes the shapes of the tensors that a model asks for."""

    def __init__(self, checkpoint: DummyCheckpoint) -> None:
        super().__init__(checkpoint)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        self.shapes[name] = shape
        return super().load(name, shape)


def write_weights(folder: Path) -> int:
    """Write the weights of the model whose ``config.json`` is in ``folder`` there; returns their bytes.

    They are those that ``--load-format dummy`` makes with the seed 0; experts in MXFP4 have random bits instead. Raises
    ``CheckpointError`` for a configuration that is not supported.
    """
    config, others = read_configs(folder)
    quantised = config.pop("quantization_config", {"quant_method": None})["quant_method"]
    if quantised not in (None, "mxfp4"):
        raise CheckpointError(f"quantization_config.quant_method: {quantised!r} is not written, only 'mxfp4'")
    checkpoint = DummyCheckpoint(config, others, 0)
    asked = ShapeRecorder(checkpoint)
    load_model(read_config(config), asked, WeightFormat(torch.float32, torch.device("meta")))
    total, where = 0, dict[str, str]()
    for number, shard in enumerate(_shards(checkpoint, asked.shapes, quantised == "mxfp4")):
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def _shards(
    checkpoint: DummyCheckpoint, shapes: dict[str, tuple[int, ...]], has_mxfp4: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in parts of ``SHARD_BYTES``, or a little more."""
    shard, size = dict[str, torch.Tensor](), 0
    for name, shape in track(shapes.items(), "tensors", console=Console(stderr=True), transient=True):
        is_stack = has_mxfp4 and len(shape) == 3
        own = _mxfp4(name, shape, checkpoint.seed) if is_stack else {name: checkpoint.load(name, shape)}
        shard |= own
        size += sum(tensor.nbytes for tensor in own.values())
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _mxfp4(name: str, shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """A stack of experts' matrices, which gpt-oss has as [X, inputs, outputs], in MXFP4: of each its rows in blocks of
    32 numbers with an exponent. They are about as large as other random weights."""
    X, K, N = shape
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    blocks = torch.randint(256, (X, N, K // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.full((X, N, K // 32), EXPONENT, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}
