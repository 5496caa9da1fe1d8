"""Weights that are written over, where they are: recorded kernel calls and graphs know tensors by their addresses."""

from __future__ import annotations

import hashlib
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.moe import Reports

T = TypeVar("T")
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)


class Kept:
    """What a loader made, in order, by weak references. A later loader that makes the same of other tensors, with
    ``again``, writes each over what was made before, so that no two sets of weights are in memory."""

    def __init__(self) -> None:
        self.has_constants = False
        """Whether kernels get numbers of weights as constants, so that they cannot be changed."""
        self._made: list[weakref.ref[Any] | None] = []
        self._earlier: Iterator[weakref.ref[Any] | None] | None = None

    def again(self) -> Kept:
        """For the next loader of the same model in the same format."""
        found = Kept()
        found._made, found._earlier = self._made, iter(self._made)
        return found

    def __call__(self, made: T) -> T:
        """``made``, or what was made before in its place, which then has the numbers of ``made``."""
        if self._earlier is None:
            self._made.append(_reference(made))
            return made
        earlier = next(self._earlier, None)
        old = None if earlier is None else earlier()
        if old is None:  # the model has made something else of it
            return made
        overwrite(old, made)
        kept: T = old
        return kept


def overwrite(old: Any, new: Any, around: tuple[int, ...] = ()) -> None:
    """Write the numbers of ``new`` over those of ``old``, an object of the same kind and sizes.

    ``around``: ids of the objects that contain ``new``. Raises ``CheckpointError`` where they differ in more than
    the numbers in tensors, when some may be written over already.
    """
    if old is new or id(new) in around or isinstance(new, _CODE) or isinstance(old, Reports):
        return
    inside = (*around, id(new))
    if isinstance(new, Tensor):
        if not isinstance(old, Tensor) or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise _differs(old, new)
        old.copy_(new)
    elif isinstance(new, np.ndarray):
        np.copyto(old, new, casting="no")
    elif isinstance(new, list | tuple):
        for before, after in zip(old, new, strict=True):
            overwrite(before, after, inside)
    elif isinstance(new, Mapping):
        for name, after in new.items():
            overwrite(old[name], after, inside)
    elif isinstance(attributes := getattr(new, "__dict__", None), dict) and not hasattr(new, "__qualname__"):
        while not isinstance(old, type(new)):  # a layer that a drafter listens to
            if "_layer" not in vars(old):
                raise _differs(old, new)
            old = old._layer
        for name, after in attributes.items():
            overwrite(getattr(old, name), after, inside)
    elif old != new:
        raise _differs(old, new)


def checksums(model: Any) -> dict[str, str]:
    """SHA-256 of each tensor of a model, of its type, shape and bytes, by its place in the model.

    They are the tensors that kernels read: joined, packed and divided among ranks. The order in which they are reached
    has no influence.
    """
    known: dict[tuple[int, int, str], str] = {}
    found = {}
    for name, tensor in _named_tensors(model, "", ()):
        key = tensor.data_ptr(), tensor.numel(), f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()}"
        if key not in known:
            digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
            if tensor.numel():
                digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
            known[key] = digest.hexdigest()
        found[name] = known[key]
    return found


def _named_tensors(value: Any, name: str, around: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in ``value``, whose place is ``name``; ``around``: ids of the objects that contain it."""
    if id(value) in around or isinstance(value, _CODE):
        return
    inside = (*around, id(value))
    if isinstance(value, threading.local):  # a layer that a drafter listens to, or what a step leaves behind
        value = vars(value).get("_layer")
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _named_tensors(each, f"{name}.{place}", inside)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named_tensors(each, f"{name}.{key}", inside)
    elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not hasattr(value, "__qualname__"):
        for key, each in attributes.items():
            yield from _named_tensors(each, f"{name}.{key}".removeprefix("."), inside)


def parts(made: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """The tensors of an object, as views, and all else that is no container, in the order in which ``overwrite`` finds
    them."""
    if id(made) in around or isinstance(made, _CODE):
        return
    inside = (*around, id(made))
    if isinstance(made, np.ndarray):
        yield torch.from_numpy(made)
    elif isinstance(made, list | tuple):
        for part in made:
            yield from parts(part, inside)
    elif isinstance(made, Mapping):
        yield from parts(list(made.values()), inside)
    elif not isinstance(made, Tensor) and not hasattr(made, "__qualname__") and hasattr(made, "__dict__"):
        yield from parts(list(vars(made).values()), inside)
    else:
        yield made


def _reference(made: object) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(made)
    except TypeError:  # a named tuple
        return None


def _differs(old: object, new: object) -> CheckpointError:
    shown = [f"{each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else repr(each)[:80] for each in (old, new)]
    return CheckpointError(f"these weights need another form than those that are loaded: {shown[1]} for {shown[0]}")
