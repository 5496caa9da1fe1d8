"""Made-up model folders have the real shapes, and tokenizers whose texts encode back to the same ids."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models.meta_model import outline
from octavo.models.registry import read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.dummy import DummyCheckpoint
from octavo_bench.dummy_models import SPECIAL_TOKENS, make_tokenizer, model_folder, write_model
from octavo_fleet.sim.shapes import SHAPES


@pytest.mark.parametrize("vocab_size", [600, 16_384, 151_936])
def test_text_of_random_words_encodes_to_the_same_ids(vocab_size: int) -> None:
    tokenizer = make_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    rng = random.Random(vocab_size)
    first_word = 256 + 120
    ids = [rng.randrange(first_word, vocab_size - len(SPECIAL_TOKENS)) for _ in range(2000)]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False).ids == ids


def test_special_tokens_are_the_last_ids() -> None:
    tokenizer = make_tokenizer(1000)
    assert tokenizer.encode("<|im_start|> babe<|endoftext|>").ids[::2] == [998, 997]


@pytest.mark.parametrize("vocab_size", [258, 5_000_000])
def test_a_vocabulary_that_cannot_be_made_is_refused(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        make_tokenizer(vocab_size)


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_a_folder_is_a_model(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = write_model(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    theirs = AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == config["vocab_size"] == AutoConfig.from_pretrained(folder).vocab_size
    assert theirs.eos_token_id == config["eos_token_id"]
    ours = load_tokenizer(folder)
    assert ours is not None
    assert ours.encode(" babe bibo", add_special_tokens=False) == theirs.encode(" babe bibo")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("gemma-3-1b", 999_885_952),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt-oss-20b", 20_914_757_184),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(name: str, count: int) -> None:
    checkpoint, form = DummyCheckpoint(SHAPES[name], {}, 0), WeightFormat(torch.bfloat16, torch.device("meta"))
    assert outline(read_config(SHAPES[name]), checkpoint, form).num_parameters == count


def test_names_and_paths(tmp_path: Path) -> None:
    made = model_folder("tiny", tmp_path)
    assert made == tmp_path / "tiny"
    assert model_folder(str(made), tmp_path / "other") == made
    with pytest.raises(ConfigError, match=f"one of {', '.join(SHAPES)}"):
        model_folder("no-such-shape", tmp_path)
