"""Backward passes of the ops that dense decoders use. Forward passes are the engine's own kernels.

An op of a graph keeps its inputs alone; its backward pass computes anything else again, in plain torch.

Shapes: T tokens, K inputs, N outputs or heads, H head dim, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo import ops
from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.linear.linear import PLAIN, Fused

Gradients = Sequence[Tensor | None]
Backward = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Tensor]], Gradients]
"""Given an op's arguments, those tensors in them that need a gradient, and the gradients of its results: theirs."""


def recorded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, an implementation of the op ``name``, as a node of autograd's graph; for ``dispatch.wrapped``.

    The function raises ``NotImplementedError`` if a gradient is needed of an op without a backward pass.
    """

    def keep(*args: Any, **kwargs: Any) -> Any:
        return run(*(OVERWRITE[name](*args) if name in OVERWRITE else args), **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        needed = [x for x in _tensors(args) if x.requires_grad]
        if not needed:
            return keep(*args, **kwargs)
        if name not in BACKWARDS:
            raise NotImplementedError(f"the op {name} has no backward pass")
        assert not any(x.requires_grad for x in _tensors(tuple(kwargs.values()))), f"{name}: give tensors by position"
        kinds: list[type] = []
        found = _Node.apply(partial(keep, **kwargs), BACKWARDS[name], args, kinds, *needed)  # type: ignore[no-untyped-call]
        return kinds[0](*found) if kinds else found

    return call


class _Node(torch.autograd.Function):
    """One call of an op."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], backward: Backward, args: tuple[Any, ...], kinds: list[type], *needed: Tensor
    ) -> Any:
        """``needed``: the tensors in ``args`` that need gradients. Adds the type of a named tuple to ``kinds``."""
        ctx.own_backward, ctx.args = backward, _filled(args, iter([None] * len(needed)))
        ctx.save_for_backward(*needed)
        result = run(*_filled(args, (x.detach() for x in needed)))
        if isinstance(result, Tensor):
            return result
        if hasattr(result, "_fields"):
            kinds.append(type(result))
        ctx.mark_non_differentiable(*(x for x in result if not x.is_floating_point()))
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            found = ctx.own_backward(_filled(ctx.args, iter(own)), own, grads)
        return None, None, None, None, *found


_GAP = object()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument, or in a tuple of arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)


def _filled(value: Any, tensors: Iterator[Any]) -> Any:
    """``value`` with these in place of the tensors in it that need gradients; ``None`` leaves a gap to be filled."""
    if value is _GAP or (isinstance(value, Tensor) and value.requires_grad):
        other = next(tensors)
        return _GAP if other is None else other
    if not isinstance(value, tuple):
        return value
    parts = [_filled(each, tensors) for each in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _of(formula: Callable[..., Any]) -> Backward:
    """The backward pass by autograd, of a formula in plain torch; results that it does not have get no gradient."""

    def backward(args: Sequence[Any], own: Sequence[Tensor], grads: Sequence[Tensor]) -> Gradients:
        result = formula(*args)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=False) if output.requires_grad]
        outputs, used = (list(column) for column in zip(*pairs, strict=True))
        return torch.autograd.grad(outputs, list(own), used, allow_unused=True)

    return backward


# ---- linear


def _linear_backward(args: Sequence[Any], own: Sequence[Tensor], grads: Sequence[Tensor]) -> Gradients:
    """Two products, and with an activation a third."""
    (x_TK, weight_NK), fused, (grad_TN,) = args[:2], args[2] if len(args) > 2 else PLAIN, grads
    assert isinstance(fused, Fused)
    found: dict[int, Tensor] = {id(fused.residual_TN): grad_TN}
    normed_TK = x_TK if fused.norm_K is None else ops.rms_norm.reference(x_TK, fused.norm_K, fused.eps)
    wide_NK, flat_TK = weight_NK.detach().to(x_TK.dtype), normed_TK.detach()
    if fused.activation is not None:
        bias_N = None if fused.bias_N is None else fused.bias_N.detach()
        gate_up_TN = functional.linear(flat_TK, wide_NK, bias_N).requires_grad_()
        [grad_TN] = torch.autograd.grad(GATES[fused.activation](gate_up_TN), gate_up_TN, grad_TN)
    if weight_NK.requires_grad:
        found[id(weight_NK)] = grad_TN.mT @ flat_TK
    if fused.bias_N is not None:
        found[id(fused.bias_N)] = grad_TN.sum(0)
    if normed_TK.requires_grad:
        grad_TK = grad_TN @ wide_NK
        sources = [x for x in (x_TK, fused.norm_K) if x is not None and x.requires_grad]
        grads_K = [grad_TK] if fused.norm_K is None else torch.autograd.grad(normed_TK, sources, grad_TK)
        found |= {id(x): grad for x, grad in zip(sources, grads_K, strict=True)}
    return [found[id(x)] for x in own]


def _gelu_and_mul(gate_up_T2F: Tensor, approximate: bool) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.to(torch.promote_types(gate_up_T2F.dtype, torch.float32)).chunk(2, dim=-1)
    return (ops.gelu.reference(gate_TF, approximate) * up_TF).to(gate_up_T2F.dtype)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu_and_mul.reference,
    "gelu": partial(_gelu_and_mul, approximate=False),
    "gelu_tanh": partial(_gelu_and_mul, approximate=True),
}


# ---- attention


def _attention(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """Of whole sequences, whose keys and values are all in ``qkv``."""
    q_TNH, k_TKH, v_TKH = (
        part_TX.reshape(len(part_TX), -1, heads.head_dim) for part_TX in qkv_TW.split_with_sizes(heads.sizes, dim=1)
    )
    if heads.q_norm_H is not None:
        q_TNH = ops.rms_norm.reference(q_TNH, heads.q_norm_H, heads.norm_eps)
    if heads.k_norm_H is not None:
        k_TKH = ops.rms_norm.reference(k_TKH, heads.k_norm_H, heads.norm_eps)
    if cos_TR is not None and sin_TR is not None:
        q_TNH, k_TKH = ops.apply_rope.reference(q_TNH, k_TKH, cos_TR, sin_TR)
    lengths = rows.seq_lens_S.tolist()
    parts = zip(*(torch.split(x, lengths) for x in (q_TNH, k_TKH, v_TKH)), strict=True)
    return torch.cat(
        [_of_sequence(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), heads) for q, k, v in parts]
    )


def _of_sequence(q_NLH: Tensor, k_KLH: Tensor, v_KLH: Tensor, heads: HeadLayout) -> Tensor:
    """Causal attention within one sequence, [L, N * H]; by a kernel of torch, except for what those do not have."""
    L, group = q_NLH.shape[1], heads.num_heads // heads.num_kv_heads
    is_of_torch = not heads.softcap and heads.sinks_N is None
    is_plain = is_of_torch and not heads.window and heads.slopes_N is None
    bias_NLL = None if is_plain else _bias(L, heads, q_NLH)
    if is_of_torch:
        q, k, v = (x.unsqueeze(0) for x in (q_NLH, k_KLH, v_KLH))
        out_1NLH = functional.scaled_dot_product_attention(
            q, k, v, bias_NLL, is_causal=is_plain, scale=heads.scale, enable_gqa=group > 1
        )
        return out_1NLH[0].transpose(0, 1).flatten(1)
    assert bias_NLL is not None
    wide = torch.promote_types(q_NLH.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(group, dim=0) for x in (k_KLH, v_KLH))
    scores_NLL = q_NLH.to(wide) @ keys.mT * heads.scale
    if heads.softcap:
        scores_NLL = _softcap(scores_NLL, heads.softcap)
    scores_NLL = scores_NLL + bias_NLL
    if heads.sinks_N is not None:
        sinks_NL1 = heads.sinks_N.to(wide)[:, None, None].expand(-1, L, 1)
        scores_NLL = torch.cat((scores_NLL, sinks_NL1), dim=-1)
    out_NLH = scores_NLL.softmax(-1)[..., :L] @ values
    return out_NLH.to(q_NLH.dtype).transpose(0, 1).flatten(1)


def _bias(L: int, heads: HeadLayout, like: Tensor) -> Tensor:
    """What is added to scores, [N or 1, L, L]: slopes, and -inf for hidden keys."""
    positions_L = torch.arange(L, device=like.device)
    distance_LL = positions_L.unsqueeze(1) - positions_L
    is_hidden_LL = distance_LL < 0
    if heads.window:
        is_hidden_LL |= distance_LL >= heads.window
    bias_NLL = like.new_zeros(1, L, L)
    if heads.slopes_N is not None:
        bias_NLL = (-heads.slopes_N[:, None, None] * distance_LL).to(like.dtype)
    return bias_NLL.masked_fill(is_hidden_LL, float("-inf"))


# ---- the vocabulary


def _embedding(token_ids_T: Tensor, table_VD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gradients of a token's rows are added in float32."""
    return functional.embedding(token_ids_T, table_VD.float()).to(dtype or table_VD.dtype)


def _logprobs(logits_RV: Tensor, tokens_R: Tensor, n: int) -> Tensor:
    return logits_RV.float().log_softmax(1).gather(1, tokens_R.long().unsqueeze(1)).squeeze(1)


def _softcap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh() * cap


REFERENCES = (
    *(ops.rms_norm, ops.layer_norm, ops.gelu, ops.silu_and_mul, ops.sigmoid_and_mul, ops.scaled),
    *(ops.apply_rope, ops.concat),
)
"""Ops whose references autograd can follow: they call no op and overwrite nothing."""
BACKWARDS: dict[str, Backward] = {
    **{op.name: _of(op.reference) for op in REFERENCES},
    ops.linear.name: _linear_backward,
    ops.gelu_and_mul.name: _of(_gelu_and_mul),
    ops.attention.name: _of(_attention),
    ops.embedding.name: _of(_embedding),
    ops.token_logprobs.name: _of(_logprobs),
    ops.softcap.name: _of(_softcap),
    ops.squared_relu.name: _of(lambda x_TF: x_TF.relu().square()),
}


def _with_own_residual(x_TK: Tensor, weight_NK: Tensor, fused: Fused = PLAIN) -> tuple[Any, ...]:
    own = None if fused.residual_TN is None else fused.residual_TN.clone()
    return x_TK, weight_NK, fused._replace(residual_TN=own)


OVERWRITE: dict[str, Callable[..., tuple[Any, ...]]] = {
    ops.linear.name: _with_own_residual,
    ops.softcap.name: lambda x, cap: (x.clone(), cap),
    ops.squared_relu.name: lambda x: (x.clone(),),
}
"""Ops that may overwrite an argument: their arguments with a copy of it, as the graph needs what it had."""
