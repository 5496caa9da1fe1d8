"""The text part of Gemma 3n (Google): several residual streams, of which each layer computes one and corrects all.

The streams are mixed before a layer, and corrected behind it, by maps of the token (AltUp, arXiv 2301.13310). Beside
attention is a map of low rank (LAuReL, arXiv 2411.07501), the first layers let only the largest gates through, and the
last ones share keys and values and have, like all, an embedding of the token of their own, as in Gemma 4.

Shapes: T tokens of the step, R rows whose logits are needed, D model, I streams, L layers, F ffn.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from octavo.layers.attention_inputs import StepAngles
from octavo.layers.mlp import MLP, gelu_tanh
from octavo.layers.norm import RMSNorm
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder_layer import FeedForward
from octavo.models.gemma3 import rope_keys
from octavo.models.gemma4 import Gemma4Config, Gemma4ForCausalLM, Gemma4Layer
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL, SLIDING, read_layer_types
from octavo.models.parts import DecoderConfig, MLPPart
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.collective import Collective

LEAST_MEAN_SQUARE = 1e-5
"""Of a stream that is brought to the length of another."""


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(Gemma4Config):
    num_streams: int
    active: int
    """The stream that layers compute."""
    scales_output: bool
    """Whether what a layer's own embedding is added to is scaled."""
    rank: int
    """Of the map beside attention."""
    sparsity: tuple[float, ...]
    """The share of gates that each layer sets to zero, if they were normally distributed; 0: none."""


class LargestGates:
    """``gelu(max(gates - cutoff, 0)) * ups``; the cutoff lies so many standard deviations above the mean of a row."""

    def __init__(self, share: float, ranks: Collective) -> None:
        self.deviations, self.ranks = NormalDist().inv_cdf(share), ranks

    def __call__(self, x_TF: Tensor) -> Tensor:
        gates_TF, ups_TF = x_TF.chunk(2, dim=-1)
        wide_TF, count = gates_TF.float(), self.ranks.size
        mean_T1 = self.ranks.all_reduce(wide_TF.mean(dim=-1, keepdim=True)) / count
        variance_T1 = self.ranks.all_reduce((wide_TF - mean_T1).square().mean(dim=-1, keepdim=True)) / count
        cut_TF = (wide_TF - mean_T1 - self.deviations * variance_T1.sqrt()).relu_()
        return gelu_tanh(cut_TF.to(x_TF.dtype)) * ups_TF


class Streams:
    """How a layer mixes and corrects the residual streams [T, I, D]."""

    def __init__(self, config: Gemma3nConfig, weights: WeightLoader, prefix: str) -> None:
        D, count = config.hidden_size, config.num_streams
        self.norm = weights.norm(f"{prefix}.router_norm", D, config.norm_eps)
        self.router = weights.replicated(f"{prefix}.modality_router", count, D)
        self.mix = weights.replicated(f"{prefix}.prediction_coefs", count * count, count)
        self.correction = weights.replicated(f"{prefix}.correction_coefs", count, count)

    def _of(self, x_TD: Tensor) -> Tensor:
        """What the maps of a token are made of: [T, I]."""
        return self.router(self.norm(x_TD) * (1 / x_TD.shape[1])).float().tanh().to(x_TD.dtype)

    def mixed(self, x_TID: Tensor, active: int) -> Tensor:
        count = x_TID.shape[1]
        return x_TID + torch.bmm(self.mix(self._of(x_TID[:, active])).view(-1, count, count), x_TID)

    def corrected(self, mixed_TID: Tensor, y_TD: Tensor, active: int) -> Tensor:
        """All streams, given what the layer made of the active one."""
        change_TD = y_TD - mixed_TID[:, active]
        return mixed_TID + (self.correction(self._of(y_TD)) + 1).unsqueeze(2) * change_TD.unsqueeze(1)


class Gemma3nLayer(Gemma4Layer):
    has_scalar = False

    def __init__(self, config: Gemma3nConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        D, self.active, self.num_streams = config.hidden_size, config.active, config.num_streams
        self.streams = Streams(config, weights, f"{prefix}.altup")
        scale_D = weights.dense(f"{prefix}.altup.correct_output_scale", D)
        self.output_scale_D = scale_D if config.scales_output else None
        self.left = weights.replicated(f"{prefix}.laurel.linear_left", config.rank, D)
        self.right = weights.replicated(f"{prefix}.laurel.linear_right", D, config.rank)
        self.laurel_norm = weights.norm(f"{prefix}.laurel.post_laurel_norm", D, config.norm_eps)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        mlp = super().feed_forward(config, weights, prefix, index)
        assert isinstance(config, Gemma3nConfig)
        assert isinstance(mlp, MLP)
        if config.sparsity[index]:
            mlp.activation = LargestGates(config.sparsity[index], weights.collective)
        return mlp

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """The next streams side by side, [T, I D], or [R, I D] with logits indices."""
        assert isinstance(self.after_attention, RMSNorm)
        T, count = len(x_TD), self.num_streams
        mixed_TID = self.streams.mixed(x_TD.view(T, count, -1), self.active)
        normed_TD = self.input_norm(mixed_TID[:, self.active].contiguous())
        attended_TN, both_TX = rows.pick(
            self.attend(self.qkv_proj(normed_TD), step, cache, rows),
            torch.cat((mixed_TID.flatten(1), normed_TD), dim=1),
        )
        mixed_RX, normed_RD = both_TX.split_with_sizes((count * normed_TD.shape[1], normed_TD.shape[1]), dim=1)
        normed_RD = normed_RD.contiguous()
        mixed_RID = mixed_RX.reshape(len(mixed_RX), count, normed_RD.shape[1])
        laurel_RD = self.laurel_norm(self.right(self.left(normed_RD)), normed_RD)
        active_RD = mixed_RID[:, self.active].contiguous()
        y_RD = self.mlp((self.after_attention(self.o_proj(attended_TN), active_RD) + laurel_RD) * 2**-0.5)
        out_RID = self.streams.corrected(mixed_RID, y_RD, self.active)
        first_RD = out_RID[:, self.active]
        if self.output_scale_D is not None:
            first_RD = first_RD * self.output_scale_D
        out_RID[:, 1:] += self.own_part(first_RD.contiguous(), step, rows).unsqueeze(1)
        return out_RID.flatten(1)


class Gemma3nForCausalLM(Gemma4ForCausalLM):
    layer_class = Gemma3nLayer
    config: Gemma3nConfig

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Gemma3nConfig:
        count = keys.size("num_hidden_layers")
        sizes = keys.get("intermediate_size", 16_384)
        sizes = sizes if isinstance(sizes, list | tuple) else [sizes] * count
        if len(sizes) != count or not all(type(size) is int and 0 < size < 1 << 24 for size in sizes):
            raise wrong("intermediate_size", sizes, f"a number, or a list of {count} for the layers")
        sparsity = keys.get("activation_sparsity_pattern")
        sparsity = [0.95] * 10 + [0.0] * (count - 10) if sparsity is None and count > 10 else sparsity or [0.0] * count
        is_list = isinstance(sparsity, list | tuple) and len(sparsity) == count
        if not is_list or not all(isinstance(share, int | float) and 0 <= share < 1 for share in sparsity):
            raise wrong("activation_sparsity_pattern", sparsity, f"a list of {count} numbers from 0 to below 1")
        full, local = rope_keys(keys)
        cap = "final_logit_softcapping"
        values = {
            **keys.values,
            "intermediate_size": max(sizes),
            "global_head_dim": keys.size("head_dim", 256),
            cap: keys.get(cap) if keys.has(cap) else 30.0,
            "num_kv_shared_layers": keys.size("num_kv_shared_layers", 15, low=0),
            "rope_parameters": {FULL: {"rope_theta": 1e6, **full}, SLIDING: {"rope_theta": 1e4, **local}},
        }
        config = super().read_config(keys.over(values), max_len)
        plain = config.layers[0].mlp
        assert isinstance(plain, MLPPart)
        config = config.with_mlps(lambda i: dataclasses.replace(plain, size=sizes[i]))
        streams = keys.size("altup_num_inputs", 4, low=2)
        active = keys.size("altup_active_idx", 0, low=0)
        if active >= streams:
            raise wrong("altup_active_idx", active, f"less than altup_num_inputs, {streams}")
        keys.get("altup_coef_clip")  # of training
        return config.extended(
            Gemma3nConfig,
            num_streams=streams,
            active=active,
            scales_output=keys.flag("altup_correct_scale", True),
            rank=keys.size("laurel_rank", 64),
            sparsity=tuple(map(float, sparsity)),
        )

    @staticmethod
    def _types(keys: ConfigKeys) -> tuple[str, ...]:
        return read_layer_types(keys, lambda i: (i + 1) % 5)

    def __init__(self, config: Gemma3nConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        D, count = config.hidden_size, config.num_streams - 1
        self.to_streams = [weights.replicated(f"model.altup_projections.{i}", D, D) for i in range(count)]
        self.of_streams = [weights.replicated(f"model.altup_unembed_projections.{i}", D, D) for i in range(count)]

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = super().embedded(token_ids_T, positions_T)
        return torch.cat((x_TD, *(_as_long(project(x_TD), x_TD) for project in self.to_streams)), dim=1)

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        known_T = torch.where(token_ids_T < self.config.own_vocab_size, token_ids_T, 0)
        first_TD = x_TD[:, : self.config.hidden_size].contiguous()
        return super().step(known_T, positions_T, first_TD, rows)

    def merged(self, x_RX: Tensor) -> Tensor:
        x_RD, *others = x_RX.chunk(self.config.num_streams, dim=1)
        pairs = zip(self.of_streams, others, strict=True)
        streams = [x_RD, *(_as_long(project(other.contiguous()), x_RD) for project, other in pairs)]
        return torch.stack(streams).mean(dim=0)


def _as_long(x_TD: Tensor, like_TD: Tensor) -> Tensor:
    """Rows with the root mean square of those of another stream."""
    own_T1, other_T1 = (x.square().mean(dim=1, keepdim=True) for x in (x_TD, like_TD))
    return x_TD * other_T1.sqrt() / own_T1.clamp(min=LEAST_MEAN_SQUARE).sqrt()
