"""The tensors of a checkpoint by name, with a record of which ones were read."""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.weights.gguf.block_formats import BlockTensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Part = Tensor | BlockTensor
"""A tensor as stored in a file. Only matrices can be block-quantised."""

ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_global_scale", "input_scale_ub")
MOST_CACHE_SCALES = 1 << 16
HARMLESS = re.compile(r"(^|\.)(rotary_(pos_)?emb\.inv_freq|h\.\d+\.attn\.(attention\.)?(masked_)?bias)$")
"""Redundant buffers that some exporters write: rotary frequencies, and causal masks of GPT-2 and GPT-Neo."""

CACHE_SCALES = re.compile(
    r"\.(k_scale|v_scale|kv_scale|q_scale|prob_output_scale|k_proj\.output_scale|v_proj\.output_scale)$"
)
"""Scales with which some checkpoints want keys, values and attention to be rounded to FP8."""
logger = logging.getLogger(__name__)


class TensorSource(Protocol):
    """The part of the ``Checkpoint`` interface that loading weights needs."""

    @property
    def is_dummy(self) -> bool: ...

    def names(self) -> set[str]: ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]: ...

    def load(self, name: str, shape: tuple[int, ...]) -> Part: ...


class Renamed:
    """A source whose tensors have other names; those that are not in the mapping are left out."""

    def __init__(self, source: TensorSource, stored: Mapping[str, str]) -> None:
        """``stored``: the name in the checkpoint of each name."""
        self.source = source
        self.stored = stored

    @property
    def is_dummy(self) -> bool:
        return self.source.is_dummy

    def names(self) -> set[str]:
        return set(self.stored)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.source.describe(self.stored.get(name, name))

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        return self.source.load(self.stored.get(name, name), shape)


class HeadCopy(NamedTuple):
    """A head that the checkpoint stores although it is tied to the embedding."""

    module: str
    """Its name in the model."""
    names: tuple[str, str]
    """Names of its tensor and of the embedding's in the checkpoint."""


def check_equal(name: str, own_VD: Tensor, table_VD: Tensor) -> None:
    """Raise ``CheckpointError`` unless a head that is tied to the embedding is a copy of it."""
    if not torch.equal(own_VD, table_VD):
        raise CheckpointError(f"{name}.weight differs from the embedding, but the config says tie_word_embeddings")


def has_module(names: Iterable[str], module: str) -> bool:
    """Whether there are tensors of a module, whatever its format calls them, among these names."""
    return any(name.startswith(f"{module}.") for name in names)


class Tensors:
    """Reads tensors and records which were read. Methods raise ``CheckpointError`` naming the tensor."""

    def __init__(self, source: TensorSource, aliases: Callable[[str], tuple[str, ...]] = lambda _: ()) -> None:
        self._source = source
        self._aliases = aliases
        self.names = source.names()
        self._sorted = sorted(self.names)
        self._used: set[str] = set()

    @property
    def is_dummy(self) -> bool:
        """Whether tensors are random, of any name and shape."""
        return self._source.is_dummy

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self.names

    def has_module(self, name: str) -> bool:
        """Whether the checkpoint has tensors of this module."""
        return has_module(self.names, name)

    def copy(self, module: str, table: str) -> HeadCopy | None:
        """The head of a module, as a copy of the module ``table``, if that is one tensor."""
        if not self.has(f"{table}.weight"):
            return None
        return HeadCopy(module, (self._stored_name(f"{module}.weight"), self._stored_name(f"{table}.weight")))

    def _stored_name(self, name: str) -> str:
        source = self._source
        while isinstance(source, Renamed):
            name, source = source.stored.get(name, name), source.source
        return name

    def names_of(self, module: str) -> tuple[str, ...]:
        """The names by which a ``quantization_config`` may mean this module: its own first, then its aliases."""
        return module, *self._aliases(module)

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        """A floating-point or block-quantised tensor of this shape."""
        part = self._take(name, shape)
        if isinstance(part, Tensor) and part.dtype == torch.float8_e5m2:
            return part.half()  # exactly: half precision with two bits of the fraction
        if isinstance(part, Tensor) and part.dtype not in FLOATS:
            raise CheckpointError(f"tensor {name} is {_type_name(part)}; expected floating-point numbers")
        return part

    def numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A floating-point tensor of this shape."""
        part = self.load(name, shape)
        if isinstance(part, BlockTensor):
            raise CheckpointError(f"tensor {name} is {part.kind}; expected floating-point numbers")
        return part

    def typed(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """A tensor of this shape and one of these dtypes, for formats that use several tensors per matrix."""
        part = self._take(name, shape)
        if not isinstance(part, Tensor) or part.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(f"tensor {name} is {_type_name(part)}; expected {allowed}")
        return part

    def scales(self, name: str, *shapes: tuple[int, ...], dtypes: Sequence[torch.dtype] = FLOATS) -> Tensor:
        """A tensor of one of these dtypes and shapes, without infinities and NaNs, in float32."""
        found = self.shape(name)
        part = self.typed(name, found if found in shapes else shapes[0], *dtypes).float()
        self.check(torch.isfinite(part), f"tensor {name} has scales that are infinite or not numbers")
        return part

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor in the checkpoint, ``None`` if it has none of this name."""
        return self._source.describe(name)[1] if self.has(name) else None

    def needs_scales(self, name: str) -> bool:
        """Whether the checkpoint has this tensor, of integers or of floats of 8 bits and fewer."""
        return self.dtype(name) not in (None, *FLOATS)

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in the checkpoint, ``None`` if it has none of this name or stores it in blocks."""
        shape = self.shape(name)
        part = None if shape is None else self._source.load(name, shape)
        return part.dtype if isinstance(part, Tensor) else None

    def check(self, holds: Tensor, message: str) -> None:
        """Raise ``CheckpointError(message)`` unless all of ``holds`` is true, or unknown as on the "meta" device."""
        if not holds.is_meta and not holds.all():
            raise CheckpointError(message)

    def leave_out_activation_scales(self, module: str) -> None:
        """Check the scales with which a module's inputs may be rounded, which are not used."""
        for part in ACTIVATION_SCALES:
            if self.has(f"{module}.{part}"):
                self.scales(f"{module}.{part}", (1,), (), (1, 1))
        if self.has(f"{module}.input_zero_point"):
            self._used.add(f"{module}.input_zero_point")

    def cache_scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Scales of quantised keys, values or others of attention, in float32."""
        if math.prod(shape) > MOST_CACHE_SCALES:
            raise CheckpointError(f"tensor {name} has shape {list(shape)}; expected scales of heads at most")
        scales = self.scales(name, shape)
        self.check(scales > 0, f"tensor {name} has scales that are not positive")
        return scales

    def leave_out(self, *prefixes: str) -> None:
        """Ignore tensors whose names start with one of these. Costs O(log n) besides what it finds: a rank leaves out
        each expert that it does not hold."""
        for prefix in prefixes:
            index = bisect_left(self._sorted, prefix)
            while index < len(self._sorted) and self._sorted[index].startswith(prefix):
                self._used.add(self._sorted[index])
                index += 1

    def leave_out_zeros(self, name: str, shape: tuple[int, ...]) -> None:
        """Ignore this tensor, if it is there with this shape and without any number but zero."""
        if self.shape(name) == shape:
            part = self._source.load(name, shape)
            if isinstance(part, Tensor) and (part.is_meta or not part.any()):
                self._used.add(name)

    def finish(self) -> None:
        """Refuse a checkpoint with unread tensors, unless they are empty, as of shared experts that are none."""
        if self._source.is_dummy:
            return
        self._leave_out_cache_scales()
        others = [name for name in self.names - self._used if not HARMLESS.search(name)]
        unexpected = sorted(name for name in others if 0 not in self._source.describe(name)[1])
        if unexpected:
            shown = "; ".join(self._found(name) for name in unexpected[:5]) + ("; ..." if len(unexpected) > 5 else "")
            raise CheckpointError(f"{len(unexpected)} tensors that this architecture does not have: {shown}")

    def _leave_out_cache_scales(self) -> None:
        """Check the scales of attention that no layer has read, which are not used."""
        names = [name for name in self.names - self._used if CACHE_SCALES.search(name)]
        for name in names:
            self.cache_scales(name, self.shape(name) or ())
        if names:
            logger.warning("%d scales of attention are not used, %s among them", len(names), min(names))

    def _found(self, name: str) -> str:
        kind, shape = self._source.describe(name)
        return f"{name}: expected none, found {kind} of shape {list(shape)}"

    def _take(self, name: str, shape: tuple[int, ...]) -> Part:
        if not self._source.is_dummy and name not in self.names:
            raise CheckpointError(f"tensor {name} is missing; expected one of shape {list(shape)}")
        part = self._source.load(name, shape)
        if tuple(part.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(part.shape)}; expected {list(shape)}")
        self._used.add(name)
        return part


def _type_name(part: Part) -> str:
    return part.kind if isinstance(part, BlockTensor) else str(part.dtype).removeprefix("torch.")
