"""Modules of the library whose meaning is known, computed by Octavo's operations in place of their own code.

Linear maps, RMSNorms, gated feed-forward layers and the rotation of queries and keys take most of a decoder's launches.
A module is replaced if its parameters have the names of such a layer and random rows show that it computes one; the
trial of the whole model says whether the result is that of the library, see ``trial.py``.

Shapes: T rows, D inputs, N outputs, F width of a feed-forward layer.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo import ops
from octavo.ops.linear.linear import Activation, Fused
from octavo_fleet.transformers.paged import AttentionState

GROUPS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("gate_proj", "up_proj"))
"""Names of linear maps of one input, whose outputs lie side by side."""
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}
ROTATION = "apply_rotary_pos_emb"
"""The name by which attention of the library rotates queries and keys."""
ROTATED = ["q", "k", "cos", "sin"]
"""Its first parameters, where it rotates queries and keys at once."""
COLUMNS = "octavo_columns"
"""The attribute of a linear map that is computed together with others."""
SIZES = (1.0, 30.0, 1000.0)
"""Of the random rows on which a module is compared with what it is taken for: some clamp large numbers."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference of a row, relative to its largest element."""


class KnownModules:
    """The modules of a model that are known, as they are computed by operations."""

    def __init__(self, state: AttentionState) -> None:
        self._state = state
        self._replaced: list[nn.Module] = []
        self._rotating: list[nn.Module] = []

    def replace(self, model: nn.Module) -> None:
        """Replace what is known. Weights of a group become views of one tensor."""
        owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
        for parent in list(model.modules()):
            for names in GROUPS:
                self._join(parent, names, owners)
        for module in list(model.modules()):
            if (forward := _known(module)) is not None:
                self._replace(module, forward)
            elif (rotated := _without_rotation(module, self._state)) is not None:
                self._replace(module, rotated)
                self._rotating.append(module)

    def __str__(self) -> str:
        """How many modules are computed by operations, for the log."""
        counts = Counter(type(module).__name__ for module in self._replaced if "forward" in vars(module))
        return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no modules"

    def rotate_as_before(self) -> bool:
        """Let attention rotate queries and keys by its own code again; False if it does already."""
        return _restore(self._rotating)

    def restore(self) -> bool:
        """Let all modules run their own code again; False if they do already."""
        return _restore(self._replaced)

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._replaced.append(module)

    def _join(self, parent: nn.Module, names: tuple[str, ...], owners: Counter[int]) -> None:
        """Compute the maps of these names together, where a module has them all; ``owners`` of parameters by id."""
        parts = [getattr(parent, name, None) for name in names]
        linears = [part for part in parts if _is_plain(part)]
        if len(linears) != len(names) or len({_kind(linear) for linear in linears}) > 1:
            return
        if any(owners[id(parameter)] > 1 for linear in linears for parameter in linear.parameters()):
            return  # each of their owners would have a copy
        columns = _Columns(*_joined(linears), [linear.out_features for linear in linears])
        for index, linear in enumerate(linears):
            vars(linear)[COLUMNS] = columns
            self._replace(linear, _Part(columns, index))


def _restore(modules: list[nn.Module]) -> bool:
    found = [module for module in modules if "forward" in vars(module)]
    for module in found:
        del module.forward
    return bool(found)


def _is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear map and nothing more: quantisers give theirs other code, hooks and parameters."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    has_more = module._forward_hooks or module._forward_pre_hooks or module._buffers or module._modules
    return not has_more and set(module._parameters) == {"weight", "bias"} and module.weight.is_floating_point()


def _kind(linear: nn.Linear) -> tuple[Any, ...]:
    weight = linear.weight
    return linear.in_features, weight.dtype, weight.device, linear.bias is None


def _joined(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights [N, D] and biases [N] of all, which theirs become views of."""
    found: list[Tensor | None] = []
    for name in ("weight", "bias"):
        parts = [getattr(linear, name) for linear in linears]
        if parts[0] is None:
            found.append(None)
            continue
        joined = torch.cat([part.data for part in parts])
        for part, view in zip(parts, joined.split_with_sizes([len(part) for part in parts]), strict=True):
            part.data = view
        found.append(joined)
    weight_ND, bias_N = found
    assert weight_ND is not None
    return weight_ND, bias_N


class _Columns(threading.local):
    """Linear maps of one input, computed when the first of them is called. Each thread has its own results."""

    def __init__(self, weight_ND: Tensor, bias_N: Tensor | None, sizes: list[int]) -> None:
        self.weight_ND, self.bias_N, self.sizes = weight_ND, bias_N, sizes
        self._of: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """The outputs [..., N] of one of the maps; each result is kept until its map has asked for it."""
        if self._of is not x or self._parts[index] is None:
            outputs = _linear(x, self.weight_ND, self.bias_N)
            self._of, self._parts = x, list(outputs.split_with_sizes(self.sizes, dim=-1))
        found, self._parts[index] = self._parts[index], None
        assert found is not None
        if all(part is None for part in self._parts):
            self._of = None
        return found


class _Part:
    """One map of several."""

    def __init__(self, columns: _Columns, index: int) -> None:
        self._columns, self._index = columns, index

    def __call__(self, x: Tensor) -> Tensor:
        return self._columns.part(self._index, x)


def _linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None, activation: Activation | None = None) -> Tensor:
    """``ops.linear`` over the last axis."""
    y_TN = ops.linear(x.reshape(-1, x.shape[-1]), weight_ND, Fused(bias_N, activation=activation))
    return y_TN.view(*x.shape[:-1], y_TN.shape[1])


def _known(module: nn.Module) -> Callable[..., Any] | None:
    """What computes a module that is known, if it is."""
    if "forward" in vars(module):
        return None
    if _is_plain(module):
        weight_ND, bias_N = module.weight.data, None if module.bias is None else module.bias.data
        return lambda x: _linear(x, weight_ND, bias_N)
    parameters = dict(module.named_parameters())
    if type(module).__name__.endswith("RMSNorm") and set(parameters) == {"weight"} and parameters["weight"].dim() == 1:
        return _first_alike(module, parameters["weight"].shape[0], _norms(module))
    if type(module).__name__.endswith("MLP") and not any(module._forward_hooks.values()):
        gate_ups, down, activation = _gate_ups(module), getattr(module, "down_proj", None), _activation(module)
        if gate_ups is not None and isinstance(down, nn.Module) and activation is not None:

            def gated(x: Tensor) -> Tensor:
                found: Tensor = down(_linear(x, *gate_ups, activation))
                return found

            return _first_alike(module, gate_ups[0].shape[1], [gated])
    return None


def _activation(module: nn.Module) -> Activation | None:
    """What a feed-forward layer applies to its gates, if that is known."""
    function: Any = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    x = torch.linspace(-9, 9, 37)
    with contextlib.suppress(Exception):  # of any code of the library
        for name, known in ACTIVATIONS.items():
            if torch.allclose(function(x), known(x), rtol=0, atol=1e-6):
                return name
    return None


def _norms(module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """RMSNorms that a module may be."""
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight: Any = module.weight
    if not isinstance(eps, float):
        return
    for weight_D in (weight.data, (weight.data.float() + 1).to(weight.dtype)):

        def norm(x: Tensor, weight_D: Tensor = weight_D) -> Tensor:
            return ops.rms_norm(x.reshape(-1, x.shape[-1]), weight_D, eps).view(x.shape)

        yield norm


def _gate_ups(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight [2 F, D] and bias of the gates and ups of a feed-forward layer; ``None`` for others."""
    fused = getattr(module, "gate_up_proj", None)
    if _is_plain(fused):
        return fused.weight.data, None if fused.bias is None else fused.bias.data
    columns, other = (getattr(getattr(module, name, None), COLUMNS, None) for name in ("gate_proj", "up_proj"))
    is_pair = columns is other
    return (columns.weight_ND, columns.bias_N) if is_pair and isinstance(columns, _Columns) else None


def _first_alike(
    module: nn.Module, width: int, candidates: Iterable[Callable[[Tensor], Tensor]]
) -> Callable[[Tensor], Tensor] | None:
    """The candidate that gives what the module gives for random rows [1, T, width], if one does."""
    parameter, sizes = next(module.parameters()), torch.tensor(SIZES)[:, None]
    generator = torch.Generator().manual_seed(0)
    x = (sizes * torch.randn(1, len(SIZES), width, generator=generator)).to(parameter.device, parameter.dtype)
    with contextlib.suppress(Exception):  # of any code of the library, such as one with more arguments
        expected: Tensor = module(x)
        for candidate in candidates:
            if _are_alike(candidate(x), expected):
                return candidate
    return None


def _are_alike(found: Tensor, expected: Tensor) -> bool:
    """Whether rows [1, T, D] are the same but for rounding, where they are numbers."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    is_finite = expected[0].isfinite().all(dim=1)
    one, other = found[0][is_finite].float(), expected[0][is_finite].float()
    differences = (one - other).abs().amax(dim=1) / other.abs().amax(dim=1)
    return len(differences) > 0 and bool((differences < TOLERANCE.get(expected.dtype, 0.0)).all())


def _without_rotation(module: nn.Module, state: AttentionState) -> Callable[..., Any] | None:
    """The code of an attention module that leaves the rotation of queries and keys to ``ops.attention``."""
    code = inspect.unwrap(type(module).forward)
    rotation = getattr(code, "__globals__", {}).get(ROTATION)
    if not hasattr(module, "layer_idx") or rotation is None:
        return None
    if list(inspect.signature(rotation).parameters)[: len(ROTATED)] != ROTATED:
        return None

    def postponed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        state.rotation = cos, sin
        return q, k

    names = {**code.__globals__, ROTATION: postponed}
    own = types.FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    own.__kwdefaults__ = code.__kwdefaults__
    return types.MethodType(own, module)
