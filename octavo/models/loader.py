"""Loads a model's weights by name, and verifies that the checkpoint has exactly these.

A model declares what each matrix is. How the checkpoint stores it, which shard a device holds and which format a kernel
computes with are handled by ``quant``.

Shapes: K inputs, N outputs, D model, F width of an expert, V vocabulary, X experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.embedding import Embedding, VocabParallelEmbedding
from octavo.layers.expert_parallel import ExpertPlacement, HomeMixture, ParallelMixture, PartialMixture
from octavo.layers.experts import Mixture, StoredExperts, make_mixture
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.layers.norm import LayerNorm, Norm, ParallelRMSNorm, RMSNorm
from octavo.models.in_place import Kept
from octavo.models.labels import LabelHead, LabelPart
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.linear_parts import MapPart, MatrixRows
from octavo.models.parts import NormPart
from octavo.ops.attention.attention import HeadLayout, KVScales
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.ops.moe import ExpertActivation, has_gates
from octavo.plugins import CPU
from octavo.quant.cache_scales import read_cache_scales
from octavo.quant.checkpoint_tensors import HeadCopy, Tensors, TensorSource, check_equal
from octavo.quant.formats.online_quantization import quantized, quantized_head, return_memory
from octavo.quant.formats.plain import PLAIN
from octavo.quant.methods import QuantMethod
from octavo.quant.stored.shard import UNSHARDED, Section, Shard
from octavo.quant.stored.stored_weight import (
    DenseStored,
    DenseWeight,
    LinearWeight,
    Order,
    StoredWeight,
    WeightFormat,
    bytes_by_format,
    chosen_rows,
    dtype_name,
    filled,
    joined_rows,
    make_weights,
)


class ExpertShape(NamedTuple):
    """The number of experts, their sizes, and the names of their parts in a checkpoint."""

    num_experts: int
    hidden_size: int
    ffn_size: int
    activation: ExpertActivation
    gate: str = "gate_proj"
    """Only where the activation has gates."""
    up: str = "up_proj"
    down: str = "down_proj"
    num_zero: int = 0
    """Further experts that tokens choose among, which have no weights."""


class WeightLoader:
    """Loads weights by their Hugging Face names in the given format; every method raises ``CheckpointError``.

    ``shard`` is the part of each matrix that is loaded; size arguments are those of the unsharded matrix. With a
    ``collective``, layers add and exchange what the ranks compute. ``aliases``: see ``Tensors.names_of``.
    """

    def __init__(
        self,
        source: TensorSource,
        form: WeightFormat,
        make_linear: Callable[[Sequence[LinearWeight], Tensor | None], Linear] = Linear,
        *,
        method: QuantMethod = PLAIN,
        shard: Shard = UNSHARDED,
        collective: Collective = SINGLE_RANK,
        aliases: Callable[[str], tuple[str, ...]] = lambda _: (),
        kept: Kept | None = None,
    ) -> None:
        self.kept = kept or Kept()
        """What is loaded; with that of an earlier loader, ``Kept.again``, it is written over what that loaded."""
        self.form = form
        self._exact = dataclasses.replace(form, dtype=torch.float32)
        self.collective = collective
        self.maps: dict[str, MapPart] = {}
        """All linear maps loaded so far, by their names in the checkpoint."""
        self.mixtures: list[ParallelMixture] = []
        """Those of which this device holds whole experts."""
        self.copy: HeadCopy | None = None
        """A head without content on the "meta" device, which is still to be compared with the embedding."""
        self.num_parameters = 0
        self.bytes_by_format: Counter[str] = Counter()
        """Bytes of the weights loaded so far, by the format of their numbers."""
        self._make_linear = make_linear
        self._method = method
        self._shard = shard
        self.tensors = Tensors(source, aliases)

    # Vectors and dense matrices.

    def dense(self, name: str, *shape: int) -> Tensor:
        """One tensor, which the checkpoint must store unquantised."""
        return self._placed(self._numbers(name, shape))

    def exact(self, name: str, *shape: int) -> Tensor:
        """One tensor in float32, for operations computed in float32 in every format."""
        return self._counted(self._numbers(name, shape).to(device=self.form.device, dtype=torch.float32))

    def matrix(self, name: str, num_outputs: int, num_inputs: int, num_heads: int = 1) -> Tensor:
        """The matrix of module ``name``, dense even if stored quantised; its heads are divided among devices."""
        rows = MatrixRows(name, [Section(num_outputs, num_heads)])
        return self._counted(self._own(rows, self._stored(name, (num_outputs, num_inputs))).dense(self.form))

    def vectors(self, names: Sequence[str], size: int) -> Tensor:
        """A vector of each head, [heads, size], which the checkpoint stores one by one; heads are divided among
        devices."""
        rows, count = DenseStored((torch.stack([self._numbers(name, (size,)) for name in names]),)), len(names)
        return self._counted(self._own(MatrixRows(names[0], [Section(count, count)]), rows).dense(self.form))

    def exact_part(self, name: str, section: Section) -> Tensor:
        """This device's part of a vector, in float32."""
        return self.exact_parts(name, [section])

    def exact_parts(self, name: str, sections: Sequence[Section]) -> Tensor:
        """This device's parts of a vector of any shape, whose sections are divided one by one, in float32."""
        size, found = sum(section.num_rows for section in sections), self.tensors.shape(name)
        shape = found if found is not None and math.prod(found) == size else (size,)
        column = DenseStored((self._numbers(name, shape).reshape(size, 1),))
        return self._counted(self._shard.sections(name, column, sections).dense(self._exact).squeeze(1))

    def exact_columns(self, name: str, section: Section, width: int) -> Tensor:
        """This device's rows of a matrix of ``width`` columns, in float32 and transposed: [width, rows]."""
        rows = DenseStored((self._numbers(name, (section.num_rows, width)),))
        return self._counted(self._shard.sections(name, rows, [section]).dense(self._exact).t().contiguous())

    def conv(self, names: Sequence[str], sections: Sequence[Section], width: int) -> Tensor:
        """This device's channels of a convolution of each channel: [width, channels].

        The channels are stored in one tensor or in several one after the other, wherever they were cut.
        """
        channels = sum(section.num_rows for section in sections)
        found = [self.tensors.shape(f"{name}.weight") for name in names]
        counts = [shape[0] for shape in found if shape]
        if sum(counts) != channels:
            counts = [channels] if len(names) == 1 else [section.num_rows for section in sections]
        parts = [self._numbers(f"{name}.weight", (count, 1, width)) for name, count in zip(names, counts, strict=True)]
        rows = DenseStored((joined_rows(parts).squeeze(1),))
        return self._counted(self._shard.sections(names[0], rows, sections).dense(self.form).t().contiguous())

    def router(self, name: str, num_experts: int, num_inputs: int) -> Tensor:
        """The matrix of a router, replicated on every device: in the model's dtype if the checkpoint has it so, else
        in float32, as rounding could change the selection."""
        stored = self._stored(name, (num_experts, num_inputs))
        return self._counted(stored.dense(self.form if stored.layout == self.form.dtype else self._exact))

    def rounded(self, number: float) -> float:
        """A number rounded to the format's dtype."""
        return torch.tensor(number, dtype=self.form.dtype).item()

    def constant(self, value: Tensor) -> float:
        """A number that kernels get as a constant."""
        self.kept.has_constants = True
        return 1.0 if value.is_meta else value.item()

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """The normalisation with ``name.weight``, to which ``offset`` is added."""
        return RMSNorm(self.norm_weight(f"{name}.weight", size, offset), eps)

    def layer_norm(self, name: str, size: int, eps: float, part: NormPart | None = None) -> LayerNorm:
        """The normalisation with ``name.weight`` and ``name.bias``, or with those that ``part`` says there are."""
        part = part or NormPart()
        ones = torch.ones(size, dtype=self.form.dtype, device=self.form.device)
        weight_D = self.norm_weight(f"{name}.weight", size, part.offset) if part.has_weight else ones
        bias_D = self.dense(f"{name}.bias", size) if part.has_bias else torch.zeros_like(ones)
        return LayerNorm(weight_D, bias_D, eps)

    def stream_norm(self, name: str, size: int, eps: float, part: NormPart) -> Norm:
        """A normalisation of the residual stream."""
        if part.is_layer_norm:
            return self.layer_norm(name, size, eps, part)
        if not part.has_weight:
            return RMSNorm(torch.ones(size, dtype=self.form.dtype, device=self.form.device), eps)
        return self.norm(name, size, eps, part.offset)

    def norm_weight(self, name: str, size: int, offset: float) -> Tensor:
        """The weight of a norm with ``offset`` added to it in float32."""
        if offset == 0.0:
            return self.dense(name, size)
        exact = self._numbers(name, (size,)).to(device=self.form.device, dtype=torch.float32, copy=True)
        return self._counted(exact.add_(offset).to(self.form.dtype))

    def head_norm(self, name: str, num_heads: int, head_dim: int, eps: float) -> RMSNorm:
        """The normalisation over all heads of a token with ``name.weight``; the heads are divided among devices."""
        sections = [Section(num_heads * head_dim, num_heads)]
        column = DenseStored((self._numbers(f"{name}.weight", (num_heads * head_dim,)).unsqueeze(1),))
        own_D = self._counted(self._shard.sections(name, column, sections).dense(self.form).squeeze(1))
        if self.collective.size == 1:
            return RMSNorm(own_D, eps)
        return ParallelRMSNorm(own_D, eps, self.collective)

    # Attention heads.

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Load a layer's attention in this block: whole, where each rank computes it for sequences of its own."""
        parts = self._shard, self.collective
        if self.form.keeps_attention_whole:
            self._shard, self.collective = UNSHARDED, SINGLE_RANK
        yield
        self._shard, self.collective = parts

    def own_heads(self, heads: HeadLayout) -> HeadLayout:
        """This device's heads of a layer."""
        sinks_N, slopes_N = (
            None
            if x_N is None
            else self._shard.part("attention heads", DenseStored((x_N.unsqueeze(1),)), 0).dense(
                WeightFormat(x_N.dtype, x_N.device)
            )[:, 0]
            for x_N in (heads.sinks_N, heads.slopes_N)
        )
        return heads._replace(
            num_heads=self.num_own(heads.num_heads),
            num_kv_heads=self._shard.num_units(heads.num_kv_heads),
            sinks_N=sinks_N,
            slopes_N=slopes_N,
        )

    def own_part(self, name: str, x_V: Tensor, sections: Sequence[Section] | None = None) -> Tensor:
        """This device's part of a vector, divided by these sections or as the vocabulary is."""
        column, form = DenseStored((x_V.unsqueeze(1),)), WeightFormat(x_V.dtype, self.form.device)
        own = self._shard.vocabulary(column) if sections is None else self._shard.sections(name, column, sections)
        return self._counted(own.dense(form)[:, 0])

    def num_own(self, num_heads: int) -> int:
        """Number of this device's query heads."""
        return self._shard.num_units(num_heads)

    def cache_scales(self, specs: Sequence[LayerCacheSpec]) -> dict[int, KVScales]:
        """This device's scales of each layer whose keys and values have any, for an FP8 cache."""
        if self.tensors.is_dummy or not self._method.has_fp8_cache_scales:
            return {}
        heads = {layer: spec.num_kv_heads for layer, spec in enumerate(specs) if spec.kind == "attention"}
        with self.attention():
            return read_cache_scales(self.tensors, heads, self._shard, self.form.device)

    # Linear maps.

    def column(
        self,
        name: str,
        num_outputs: int,
        num_inputs: int,
        has_bias: bool = False,
        *,
        num_heads: int | None = None,
        order: Order | None = None,
        is_transposed: bool = False,
    ) -> Linear:
        """A column-parallel linear map: outputs are divided among devices, without splitting any of ``num_heads``.

        ``is_transposed``: the checkpoint stores it as [inputs, outputs].
        """
        rows = MatrixRows(name, [Section(num_outputs, num_heads or num_outputs)], order)
        return self.fused([rows], num_inputs, has_bias, is_transposed)

    def row(
        self, name: str, num_outputs: int, num_inputs: int, has_bias: bool = False, *, is_transposed: bool = False
    ) -> Linear | RowParallelLinear:
        """A row-parallel linear map: inputs are divided among devices, and the results are summed."""
        partial = self.partial_row(name, num_outputs, num_inputs, has_bias, is_transposed=is_transposed)
        return partial if self.collective.size == 1 else RowParallelLinear(partial, self.collective)

    def partial_row(
        self, name: str, num_outputs: int, num_inputs: int, has_bias: bool = False, *, is_transposed: bool = False
    ) -> Linear:
        """Like ``row``, but the caller sums the results."""
        whole = quantized(name, self._stored(name, (num_outputs, num_inputs), is_transposed), self.form)
        stored = self._shard.part(name, whole, 1)
        bias_N = self.dense(f"{name}.bias", num_outputs) if has_bias else None
        rows = MatrixRows(name, [Section(num_outputs, 1)])
        return self._made([(rows, stored)], None if self._shard.rank else bias_N, self._shard)

    def replicated(
        self, name: str, num_outputs: int, num_inputs: int, has_bias: bool = False, *, order: Order | None = None
    ) -> Linear:
        """A linear map replicated on every device."""
        return self.fused([MatrixRows(name, [Section(num_outputs, 1)], order)], num_inputs, has_bias)

    def qkv(
        self,
        names: Sequence[str],
        heads: HeadLayout,
        num_inputs: int,
        has_bias: bool = False,
        *,
        orders: Sequence[Order | None] = (None, None, None),
        is_transposed: bool = False,
        value_dim: int = 0,
        has_values: bool = True,
        gate: tuple[str, int] | None = None,
    ) -> Linear:
        """Fused queries, keys and values, sharded by heads; stored as three matrices or one fused matrix, whose order
        is the first of ``orders``.

        A layer that shares another layer's cache has queries alone. ``value_dim``: the width of a value head, if it is
        not that of the others. ``gate``: name and rows of a map for each head, which come first and have no bias.
        """
        if heads.shares_cache:
            names, orders = names[:1], orders[:1]
        counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
        sizes = heads.sizes if not value_dim else [*heads.sizes[:2], heads.num_kv_heads * value_dim]
        sections = [Section(size, count) for size, count in zip(sizes, counts, strict=True) if size]
        if not has_values:
            sections, orders = sections[:2], orders[:2]
        first = [] if gate is None else [MatrixRows(gate[0], [Section(gate[1], heads.num_heads)], may_have_bias=False)]
        return self.fused([*first, *_rows(names, sections, orders)], num_inputs, has_bias, is_transposed)

    def gate_up(self, names: Sequence[str], ffn_size: int, num_inputs: int, has_bias: bool = False) -> Linear:
        """Fused gate and up projections; stored as two matrices or one fused matrix."""
        return self.fused(_rows(names, [Section(ffn_size, ffn_size)] * 2, (None, None)), num_inputs, has_bias)

    def fused(
        self, parts: Sequence[MatrixRows], num_inputs: int, has_bias: bool = False, is_transposed: bool = False
    ) -> Linear:
        """Column-parallel maps of the same inputs side by side, each divided by its own sections."""
        stored, biases = [], []
        for rows in parts:
            shape = rows.num_rows, num_inputs
            weight = self._stored(rows.name, shape, is_transposed)
            stored.append((rows, self._own(rows, quantized(rows.name, weight, self.form))))
            if has_bias:
                numbers = self._numbers(f"{rows.name}.bias", shape[:1]) if rows.may_have_bias else torch.zeros(shape[0])
                biases.append(self._own(rows, DenseStored((numbers.unsqueeze(1),))))
        return self._made(stored, self._counted(filled(biases, self.form).squeeze(1)) if biases else None)

    # The vocabulary.

    def embedding(self, name: str, vocab_size: int, hidden_size: int, is_tied: bool = False) -> Embedding:
        """The embedding of module ``name``, divided among devices by vocabulary.

        ``is_tied``: its table also maps to logits, and is quantised if the format quantises the head.
        """
        load = self._head_stored if is_tied else self._stored
        if self.tensors.has(f"{name}.shard_0.weight"):
            stored = self._in_shards(name, vocab_size, hidden_size)
        else:
            stored = load(name, (vocab_size, hidden_size))
        [weight] = self._packed([self._shard.vocabulary(stored)])
        return_memory(self.form.device)
        if self.collective.size == 1:
            return Embedding(weight)
        own = self._shard.tokens(vocab_size)
        return VocabParallelEmbedding(weight, own.start, len(own), self.collective)

    def _in_shards(self, name: str, num_rows: int, width: int) -> StoredWeight:
        """A table of which the checkpoint has some rows after the other."""
        names = [f"{name}.shard_{i}" for i in range(sum(part.startswith(f"{name}.") for part in self.tensors.names))]
        counts = [(self.tensors.shape(f"{part}.weight") or (num_rows,))[0] for part in names]
        parts = [self._stored(part, (count, width)) for part, count in zip(names, counts, strict=True)]
        if sum(counts) != num_rows:
            raise CheckpointError(f"{name}: {sum(counts)} rows in parts; expected {num_rows}")
        return parts[0].join(parts[1:])

    def small_embedding(self, name: str, count: int, hidden_size: int) -> Embedding:
        """A small embedding, replicated on every device."""
        return Embedding(DenseWeight(self.matrix(name, count, hidden_size)))

    def head(
        self, name: str, shape: tuple[int, int], tied: tuple[str, Embedding] | None = None, has_bias: bool = False
    ) -> Linear:
        """The map from hidden states to logits, of shape [V, D]: separate, or tied to the embedding of a name, of
        which a checkpoint may still contain a copy: see ``copy``."""
        bias_V = None
        if has_bias:
            column = self._shard.vocabulary(DenseStored((self._numbers(f"{name}.bias", (shape[0],)).unsqueeze(1),)))
            bias_V = self._counted(column.dense(self.form).squeeze(1))
        if tied is None:
            rows = MatrixRows(name, [Section(shape[0], shape[0])])
            return self._made([(rows, self._shard.vocabulary(self._head_stored(name, shape)))], bias_V)
        table, embedding = tied
        if self.tensors.has(f"{name}.weight"):
            own = self._shard.vocabulary(self._head_stored(name, shape))
            self.num_parameters -= math.prod(shape)
            if self.form.device.type == "meta":
                self.copy = self.tensors.copy(name, table)
            else:
                rows_VD = embedding.weight.dense_NK
                rows_VD = embedding.weight.rows(torch.arange(own.shape[0])) if rows_VD is None else rows_VD
                check_equal(name, own.dense(self.form), rows_VD)
        return Linear([embedding.weight], bias_V)

    # Experts: each is sharded like a feed-forward layer, or each rank has some whole ones.

    def experts(self, prefix: str, shape: ExpertShape, has_bias: bool = False) -> Mixture:
        """Experts ``prefix.0`` and so on."""
        X, D, F = shape.num_experts, shape.hidden_size, shape.ffn_size
        names = [shape.gate, shape.up] if has_gates(shape.activation) else [shape.up]
        for others in set(range(X)).difference(self._own_experts(X)):
            self.tensors.leave_out(f"{prefix}.{others}.")

        def matrix(index: int, name: str, size: tuple[int, int]) -> StoredWeight:
            return self._method.matrix(f"{prefix}.{index}.{name}", size, self.tensors, False)

        def part(index: int, name: str, size: tuple[int, int], dim: int) -> StoredWeight:
            module = f"{prefix}.{index}.{name}"
            return self._of_expert(module, quantized(module, matrix(index, name, size), self.form), dim, unit)

        unit = matrix(self._own_experts(X)[0], shape.down, (D, F)).column_block

        def biases(name: str, size: int) -> Tensor:
            return torch.stack([self._numbers(f"{prefix}.{i}.{name}.bias", (size,)) for i in range(X)])

        return self._mixture(
            shape,
            lambda i: [part(i, name, (F, D), 0) for name in names],
            lambda i: [part(i, shape.down, (D, F), 1)],
            [biases(shape.gate, F), biases(shape.up, F), biases(shape.down, D)] if has_bias else None,
            unit,
        )

    def stacked_experts(
        self,
        prefix: str,
        shape: ExpertShape,
        order: Order,
        has_bias: bool = False,
        names: tuple[str, ...] = ("gate_up_proj", "down_proj"),
        is_transposed: bool | None = None,
    ) -> Mixture:
        """Experts that the checkpoint stacks in two tensors, ``names`` behind the prefix, or in three, where gates and
        ups are apart.

        Unquantised matrices are stored as [inputs, outputs] if ``is_transposed``; ``None``: unless their shapes say
        otherwise.
        ``order`` is the index of the stored row for each row of gates, then ups.
        """
        X, D, F = shape.num_experts, shape.hidden_size, shape.ffn_size
        *ups, down_name = (f"{prefix}.{name}" for name in names)
        gate_up_name, each = ups[0], 2 * F // len(ups)
        if is_transposed is None:
            shapes = self.tensors.shape(gate_up_name), self.tensors.shape(down_name)
            is_transposed = shapes != ((X, 2 * F, D), (X, D, F))  # one alone may be a square
        stacks = {name: self._method.stack(name, (X, each, D), self.tensors, is_transposed) for name in ups}
        downs = self._method.stack(down_name, (X, D, F), self.tensors, is_transposed)
        unit, biases = downs[0].column_block, None
        if has_bias:
            gate_up_bias = chosen_rows(self._numbers(f"{gate_up_name}_bias", (X, 2 * F)).t(), order)
            biases = [*gate_up_bias.t().chunk(2, dim=1), self._numbers(f"{down_name}_bias", (X, D))]

        own = range(F) if self._has_whole_experts else self._shard.own_rows(gate_up_name, F, unit)
        halves = [half[own.start : own.stop] for half in (order[:F], order[F:])]

        def gate_up(index: int) -> list[StoredWeight]:
            wholes = [quantized(name, stack[index], self.form) for name, stack in stacks.items()]
            if len(ups) == 2:
                return [self._of_expert(gate_up_name, whole, 0, unit) for whole in wholes]
            whole = wholes[0].placed(self.form.device) if len(own) == F else wholes[0]
            return [whole.rows(half) for half in halves]

        return self._mixture(
            shape,
            gate_up,
            lambda i: [self._of_expert(down_name, quantized(down_name, downs[i], self.form), 1, unit)],
            biases,
            unit,
        )

    def _mixture(
        self,
        shape: ExpertShape,
        gate_up: Callable[[int], Sequence[StoredWeight]],
        down: Callable[[int], Sequence[StoredWeight]],
        biases: Sequence[Tensor] | None,
        unit: int,
    ) -> Mixture:
        """A mixture of stored experts, of whose width a rank has whole units; biases are those of the gates [X, F], ups
        [X, F] and downs [X, D]."""
        own, is_whole = self._own_experts(shape.num_experts), self._has_whole_experts
        gate_up_bias = down_bias = None
        if biases is not None:
            gates, ups, downs = (chosen_rows(bias, np.array(own)) for bias in biases)
            parts = [self._of_expert("biases of experts", DenseStored((bias.t(),)), 0, unit) for bias in (gates, ups)]
            gate_up_bias = self._counted(filled(parts, self.form).t().contiguous())
            down_bias = self._placed(downs) if is_whole or self._shard.rank == 0 else None
        num_routed = shape.num_experts + shape.num_zero if is_whole or shape.num_zero else 0
        are_alike = self.tensors.is_dummy and self.form.outlined_for is not None
        stored = StoredExperts(
            *(len(own), lambda i: gate_up(own[i]), lambda i: down(own[i]), shape.activation),
            *(gate_up_bias, down_bias, num_routed, are_alike),
        )
        mixture = self.kept(make_mixture(stored, self.form))
        num_matrices = 3 if has_gates(shape.activation) else 2
        self.num_parameters += num_matrices * shape.num_experts * shape.hidden_size * shape.ffn_size
        self.bytes_by_format += Counter(mixture.bytes_by_format)
        if not is_whole:
            return mixture
        kind = HomeMixture if self.form.kernel_device == CPU else PartialMixture
        placement = self._placement(shape.num_experts)
        self.mixtures.append(kind(mixture, placement, self.collective, self.form.device))
        return self.mixtures[-1]

    @property
    def _has_whole_experts(self) -> bool:
        return self.form.keeps_experts_whole and self._shard.size > 1

    def _own_experts(self, num_experts: int) -> Sequence[int]:
        """The experts that this rank holds, or of which it holds a part."""
        if not self._has_whole_experts:
            return range(num_experts)
        return self._placement(num_experts).own

    def _placement(self, num_experts: int) -> ExpertPlacement:
        return ExpertPlacement.even(num_experts, self.collective, self.form.num_spare_experts)

    def _of_expert(self, name: str, stored: StoredWeight, dim: int, unit: int) -> StoredWeight:
        """This rank's part of a matrix of one of its experts: whole units of its width."""
        return stored if self._has_whole_experts else self._shard.part(name, stored, dim, unit)

    # Labels.

    def labels(
        self, part: LabelPart, width: int, eps: float = 0.0, norm: NormPart | None = None, vocab_size: int = 0
    ) -> LabelHead:
        """A classification head of a model of this width; ``eps`` and ``norm`` are those of its norm."""
        dense = self.replicated(part.dense, width, width, part.dense_has_bias) if part.dense else None
        normed = self.stream_norm(part.norm, width, eps, norm or NormPart()) if part.norm else None
        if part.tokens is None:
            out = self.replicated(part.out, len(part.names), width, part.out_has_bias)
        else:
            name = next(name for name in ("lm_head", "model.embed_tokens") if self.tensors.has_module(name))
            rows = self._method.matrix(name, (vocab_size, width), self.tensors, False).rows(np.array(part.tokens))
            out = Linear([self.kept(weight) for weight in make_weights([rows], self.form)])
        return LabelHead(part, dense, normed, out)

    # Helpers.

    def _head_stored(self, name: str, shape: tuple[int, int]) -> StoredWeight:
        stored = quantized_head(name, self._stored(name, shape), self.form)
        return_memory(self.form.device)
        return stored

    def _own(self, rows: MatrixRows, stored: StoredWeight) -> StoredWeight:
        ordered = stored if rows.order is None else stored.rows(rows.order)
        return self._shard.sections(rows.name, ordered, rows.sections)

    def _made(
        self, parts: Sequence[tuple[MatrixRows, StoredWeight]], bias_N: Tensor | None, input_shard: Shard = UNSHARDED
    ) -> Linear:
        weights = self._packed(stored for _, stored in parts)
        linear, start = self._make_linear(weights, bias_N), 0
        for rows, stored in parts:
            num_outputs, num_inputs = stored.shape
            self.maps[rows.name] = MapPart(linear, start, num_outputs, num_inputs, rows, input_shard, self._shard)
            start += num_outputs
        return linear

    def _packed(self, parts: Iterable[StoredWeight]) -> list[LinearWeight]:
        weights = [self.kept(weight) for weight in make_weights(parts, self.form)]
        self.bytes_by_format += bytes_by_format(weights)
        return weights

    def _stored(self, name: str, shape: tuple[int, int], is_transposed: bool = False) -> StoredWeight:
        stored = self._method.matrix(name, shape, self.tensors, is_transposed)
        self.num_parameters += math.prod(shape)
        return stored

    def _numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        numbers = self.tensors.numbers(name, shape)
        self.num_parameters += math.prod(shape)
        return numbers

    def _placed(self, numbers: Tensor) -> Tensor:
        return self._counted(numbers.to(device=self.form.device, dtype=self.form.dtype))

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes_by_format[dtype_name(tensor.dtype)] += tensor.nbytes
        return self.kept(tensor)


def _rows(names: Sequence[str], sections: Sequence[Section], orders: Sequence[Order | None]) -> list[MatrixRows]:
    """One matrix per section, or one fused matrix with all sections."""
    if len(names) == 1:
        return [MatrixRows(names[0], sections, orders[0])]
    return [MatrixRows(name, [section], order) for name, section, order in zip(names, sections, orders, strict=True)]
