"""Names of models that users type, ``owner/name:Q4_K_M`` among them, and what a repository lists."""

from __future__ import annotations

import contextlib

from octavo.errors import ConfigError
from octavo.weights.gguf.hub_gguf import choose_file, parse_hub_gguf
from octavo.weights.gguf.split_files import part_names
from tests.fuzz.target import Target

FILES = b"\nmodel-Q4_K_M.gguf\nmodel-Q8_0-00001-of-00002.gguf\nmodel-Q8_0-00002-of-00002.gguf\nmmproj-F16.gguf\n"


def make() -> Target:
    return Names()


class Names(Target):
    """The first line is the name; the others are the files of the repository."""

    seeds = [name + FILES for name in (b"owner/name:Q4_K_M", b"hf.co/owner/name:q8_0", b"https://hf.co/o/n:UD-IQ2_XXS")]
    words = (b":", b"/", b"hf:", b"Q4_K_M", b".gguf", b"-00001-of-00002", b"..", b"\n")

    def read(self, data: bytes) -> None:
        name, *files = data.decode(errors="replace").split("\n")
        wanted = parse_hub_gguf(name)
        for file in files:
            assert file in part_names(file)
        if wanted is not None:
            with contextlib.suppress(ConfigError):
                choose_file(files, wanted)
