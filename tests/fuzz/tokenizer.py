"""``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import contextlib
import json

from octavo.errors import CheckpointError, InvalidParameter
from octavo.text.tokenizer import load_tokenizer
from tests.fuzz.target import JSONTarget, Target, as_json
from tests.llm.tiny import write_checkpoint

FILES = ("tokenizer.json", "tokenizer_config.json")
SPLIT = {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|\\w+"}, "behavior": "Isolated", "invert": False}
SPELL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPECIAL, TEXT = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
STEPS = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            {"type": "Prepend", "prepend": "x"},
            {"type": "NFKC"},
        ],
    },
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, SPELL]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [SPECIAL, TEXT],
        "pair": [SPECIAL, TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [8], "tokens": ["<|end|>"]}},
    },
}
"""More parts of a tokenizer.json."""


def make() -> Target:
    return TokenizerFiles()


class TokenizerFiles(JSONTarget):
    def __init__(self) -> None:
        super().__init__()
        write_checkpoint(self.folder)
        whole = {name: json.loads((self.folder / name).read_text()) for name in FILES}
        small = json.loads(json.dumps(whole))
        vocabulary = small["tokenizer.json"]["model"]["vocab"]
        # With few tokens, so that most changes are elsewhere.
        small["tokenizer.json"]["model"]["vocab"] = {name: vocabulary[name] for name in list(vocabulary)[:8]}
        small["tokenizer.json"]["added_tokens"][0]["id"] = 8
        small["tokenizer_config.json"]["added_tokens_decoder"] = {"8": {"content": "<|end|>", "special": True}}
        steps = json.loads(json.dumps(small))
        steps["tokenizer.json"] |= STEPS
        self.seeds = [as_json(small), as_json(steps), as_json(whole)]

    def read(self, data: bytes) -> None:
        try:
            files = json.loads(data)
        except (ValueError, RecursionError):
            (self.folder / FILES[0]).write_bytes(data)
        else:
            for name in FILES:
                (self.folder / name).write_bytes(as_json(files.get(name) if isinstance(files, dict) else files))
        with contextlib.suppress(CheckpointError):
            if (tokenizer := load_tokenizer(self.folder)) is not None:
                tokenizer.special_ids_by_text()
                with contextlib.suppress(InvalidParameter):  # the library fails with this text
                    tokenizer.encode("Hi, you.")
                    tokenizer.encode_pair("Hi", " a" * 100)
