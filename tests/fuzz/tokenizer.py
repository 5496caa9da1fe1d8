"""``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import contextlib
import json

from octavo.errors import CheckpointError
from octavo.text.tokenizer import load_tokenizer
from tests.fuzz.target import JSONTarget, Target, as_json
from tests.llm.tiny import write_checkpoint

FILES = ("tokenizer.json", "tokenizer_config.json")


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
        small["tokenizer_config.json"]["added_tokens_decoder"] = {"256": {"content": "<|end|>", "special": True}}
        self.seeds = [as_json(small), as_json(whole)]

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
                tokenizer.encode("Hi, you.")
