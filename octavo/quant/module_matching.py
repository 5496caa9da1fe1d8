"""Matches modules against the names and patterns in the lists of a ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from octavo.errors import CheckpointError

MOST_REPEATS = 5
ESCAPES_AND_CLASSES = re.compile(r"\\.|\[[^\]]*\]")
REPEATS, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
PATTERN = "re:"
"""Begins a target of compressed-tensors that is a pattern."""
LINEAR_CLASSES = ("Linear", "LinearBase")
HEAD_CLASSES = (*LINEAR_CLASSES, "ParallelLMHead")
EMBEDDING_CLASSES = ("Embedding", "Gemma3TextScaledWordEmbedding", "VocabParallelEmbedding")
"""Classes of modules in torch, transformers and vLLM, in alphabetical order."""
EMBEDDING_NAMES = re.compile(r"embed_tokens|wte|wpe|\w+_embeddings")
"""The last components of names of embeddings."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class ModuleTargets(Generic[Value]):
    """Values of modules, found as the compressed-tensors library does.

    A target that is the module's name goes before patterns, which are matched from the start of the name, and those go
    before classes, whatever their groups. Of several patterns, or classes, the first in alphabetical order counts; of
    equal targets, the last. (vLLM takes the first name or pattern in the order of the groups.)
    """

    names: Mapping[str, Value]
    """Values by names of modules and classes."""
    patterns: tuple[tuple[re.Pattern[str], Value], ...]
    """In alphabetical order."""

    @classmethod
    def of(cls, groups: Iterable[tuple[str, Sequence[str], Value]]) -> ModuleTargets[Value]:
        """Each group has a key, by which errors name it, its targets and their value. Raises ``CheckpointError``."""
        names, patterns = {}, {}
        for key, targets, value in groups:
            for target in targets:
                if target.startswith(PATTERN):
                    patterns[target] = compiled(target.removeprefix(PATTERN), key), value
                else:
                    names[target] = value
        return cls(names, tuple(patterns[target] for target in sorted(patterns)))

    def find(self, *modules: str) -> Value | None:
        """The value of the module of these names, ``None`` if no target matches one of them."""
        for name in modules:
            if name in self.names:
                return self.names[name]
        for pattern, value in self.patterns:
            if any(map(pattern.match, modules)):
                return value
        return next((self.names[name] for name in _classes(modules[0]) if name in self.names), None)


def _classes(module: str) -> tuple[str, ...]:
    """The targets that are classes of this module."""
    component = module.rpartition(".")[2]
    if EMBEDDING_NAMES.fullmatch(component):
        return EMBEDDING_CLASSES
    return HEAD_CLASSES if component == "lm_head" else LINEAR_CLASSES


def compiled(pattern: str, key: str) -> re.Pattern[str]:
    """A pattern in a ``quantization_config``. Raises ``CheckpointError`` naming the key.

    Patterns whose matching could take very long are refused: those with repeated groups or many repeats.
    """
    wrong = f"config: quantization_config.{key}: {pattern[:200]!r}"
    plain = ESCAPES_AND_CLASSES.sub("x", pattern)
    if len(REPEATS.findall(plain)) > MOST_REPEATS or REPEATED_GROUP.search(plain):
        raise CheckpointError(f"{wrong} has repeated groups or more than {MOST_REPEATS} repeats (* or +)")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise CheckpointError(f"{wrong} is not a pattern: {error}") from None


def names_module(names: Sequence[str], module: str) -> bool:
    """Whether one of the names matches the module or an enclosing module, or trailing components of either.

    A ``*`` matches any one component, as in ``model.layers.*.self_attn``.
    """
    return any(re.search(rf"(^|\.){_pattern(name)}(\.|$)", module) for name in names)


def _pattern(name: str) -> str:
    return r"[^.]+".join(re.escape(part) for part in name.split("*"))
