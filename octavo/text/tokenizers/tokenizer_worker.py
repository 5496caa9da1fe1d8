"""The child process that reads the tokenizer of a folder before another process does.

See ``octavo.system.child_worker``. A question is the path of the folder; the answer is empty, or an error.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from octavo.errors import CheckpointError, InvalidParameter
from octavo.system.child_worker import INVALID, RENDERED, Answer, ChildWorker, start
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizers.folder_tokenizer import read_parts

TEXTS = ("", "The first text.", *(character * 1000 for character in " a1.\n\u00e9\u4e2d"))
"""What is encoded: a normalizer or a regular expression may be slow with any text."""


def serve(folder: str) -> Answer:
    """Read the tokenizer, and encode a few texts."""
    try:
        parts = read_parts(Path(folder))
        if parts is not None:
            tokenizer = Tokenizer(parts)
            tokenizer.prepare_to_encode()
            for text in TEXTS:
                with contextlib.suppress(InvalidParameter):  # as a request with this text would get
                    tokenizer.encode(text)
    except CheckpointError as error:
        return INVALID, str(error)
    return RENDERED, ""


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's threads cannot be started under the limits
    started = start()
    if started is not None:
        connection, settings = started
        ChildWorker(connection, settings).run(serve)


if __name__ == "__main__":
    main()
