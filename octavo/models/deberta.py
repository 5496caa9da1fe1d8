"""DeBERTa v2 and v3 (arXiv 2006.03654 and 2111.09543): BERT whose attention scores also tell how a token's content goes
with the distance to another's, and the distance with the other's content ("disentangled attention").

Shapes: T tokens of several texts, L tokens of one, Q rows of it that are computed together, N heads, H head dim, P
relative positions, D model, W = 3 N H.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.layers.attention_inputs import StepAngles
from octavo.layers.linear import Linear
from octavo.layers.mlp import gelu, gelu_tanh, relu
from octavo.models.bert import BERT, BertModel, read_labels, with_bert_embeddings, with_positions
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.encoder import EncoderConfig, EncoderLayer, read_encoder
from octavo.models.labels import tanh
from octavo.models.loader import WeightLoader
from octavo.ops.attention.attention import MAX_SCRATCH

NAMES = BERT._replace(queries=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"))
POOLER_ACTIVATIONS = {"gelu": gelu, "gelu_new": gelu_tanh, "relu": relu, "tanh": tanh}
KINDS = ("c2p", "p2c")
"""Content to position, and position to content."""


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(EncoderConfig):
    """The configuration of DeBERTa v2 and v3."""

    kinds: tuple[str, ...]
    """Which of ``KINDS`` scores have."""
    span: int
    """Half of the number of relative positions."""
    num_buckets: int
    """Relative positions are logarithmic beyond half of this; 0: there is one for each distance."""
    max_distance: int
    shares_projections: bool
    """Whether relative positions are projected as tokens are."""
    norms_positions: bool

    def positions_of(self, longest: int) -> Tensor:
        """The relative position (int64) of each distance from -``longest`` to ``longest``: the query's position less
        the key's."""
        distance = torch.arange(-longest, longest + 1)
        bucket = distance
        if self.num_buckets:
            middle = self.num_buckets // 2
            most = torch.tensor((self.max_distance - 1) / middle)
            far = distance.abs().clamp(min=middle)
            log = torch.ceil((far / middle).log() / most.log() * (middle - 1)) + middle
            bucket = torch.where(distance.abs() <= middle, distance, (log * distance.sign()).long())
        return (bucket + self.span).clamp(0, 2 * self.span - 1)


class DebertaLayer(EncoderLayer):
    """Scores are ``(q k + q p' + k q') / sqrt(c H)``: p' and q' are the relative position's, c the number of terms."""

    relative_PD: Tensor
    """Vectors of the relative positions, and the relative position of each distance, which the model sets."""
    positions: Tensor

    def __init__(self, config: DebertaConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        self.scale = 1 / math.sqrt(self.heads.head_dim * (1 + len(config.kinds)))
        self.kinds = config.kinds
        self.own: dict[str, Linear] = {}
        if not config.shares_projections:
            D = config.hidden_size
            for kind, name in zip(KINDS, ("pos_key_proj", "pos_query_proj"), strict=True):
                if kind in config.kinds:
                    self.own[kind] = weights.replicated(f"{prefix}.attention.self.{name}", D, D, True)
        self._projected: dict[str, Tensor] = {}

    def projected(self, kind: str) -> Tensor:
        """Keys or queries of the relative positions [N, H, P], computed once."""
        if kind not in self._projected:
            x_PD, NH = self.relative_PD, self.heads.sizes[0]
            if kind in self.own:
                y_PN = self.own[kind](x_PD)
            else:
                queries_PN, keys_PN, _ = self.qkv_proj(x_PD).split_with_sizes(self.heads.sizes, dim=1)
                y_PN = keys_PN if kind == "c2p" else queries_PN
            self._projected[kind] = y_PN.view(len(x_PD), NH // self.heads.head_dim, -1).permute(1, 2, 0).float()
        return self._projected[kind]

    def attend_to_all(self, qkv_TW: Tensor, step: StepAngles, ends: Sequence[int], bias_NM: Tensor | None) -> Tensor:
        N, out_TN = self.heads.num_heads, torch.empty_like(qkv_TW[:, : self.heads.sizes[0]])
        for start, end in zip([0, *ends], ends, strict=False):
            q_NLH, k_NLH, v_NLH = qkv_TW[start:end].float().view(end - start, 3, N, -1).permute(1, 2, 0, 3)
            out_TN[start:end] = self._attended(q_NLH, k_NLH, v_NLH).transpose(0, 1).flatten(1)
        return out_TN

    def _attended(self, q_NLH: Tensor, k_NLH: Tensor, v_NLH: Tensor) -> Tensor:
        """The outputs of one text."""
        N, L, _ = q_NLH.shape
        rows, middle = torch.arange(L, device=q_NLH.device), len(self.positions) // 2
        of_keys_NLP = k_NLH @ self.projected("p2c") if "p2c" in self.kinds else None
        chunk, parts = max(1, MAX_SCRATCH // (N * L)), []
        for first in range(0, L, chunk):
            q_NQH = q_NLH[:, first : first + chunk]
            scores_NQL = q_NQH @ k_NLH.mT
            position_QL = self.positions[rows[first : first + chunk, None] - rows + middle].expand(N, -1, -1)
            if "c2p" in self.kinds:
                scores_NQL += (q_NQH @ self.projected("c2p")).gather(2, position_QL)
            if of_keys_NLP is not None:
                scores_NQL += of_keys_NLP.gather(2, position_QL.mT).mT
            parts.append(scores_NQL.mul_(self.scale).softmax(dim=-1) @ v_NLH)
        return torch.cat(parts, dim=1)


class DebertaV2Model(BertModel):
    """An encoder: DeBERTa v2 and v3 (arXiv 2006.03654)."""

    layer_class = DebertaLayer
    layers: list[DebertaLayer]  # type: ignore[assignment]

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.must_be({"conv_kernel_size": (0,), "relative_attention": (True,), "attention_head_size": ()})
        if not keys.flag("relative_attention"):
            raise wrong("relative_attention", False, "true")
        keys.pass_over("conv_act", "legacy", "pooler_dropout", "cls_dropout", "z_steps")
        plain = with_bert_embeddings(read_encoder(keys, names=NAMES, eps=1e-7), keys, num_types=0)
        most = plain.max_position_embeddings
        if keys.flag("position_biased_input", True):
            plain = with_positions(plain)
        D = plain.hidden_size
        plain = dataclasses.replace(
            plain,
            root="deberta.",
            embedding_size=keys.size("embedding_size", D),
            projection="embeddings.embed_proj",
            is_projected_first=True,
            left_out=("lm_predictions.", "mask_predictions.", "cls.", "lm_head.", "embeddings.position_embeddings."),
        )
        given = keys.get("pos_att_type", [])
        kinds = tuple(given.lower().split("|") if isinstance(given, str) else given)
        if not set(kinds) <= set(KINDS):
            raise wrong("pos_att_type", given, f"of {' and '.join(KINDS)}")
        farthest, buckets = keys.get("max_relative_positions", -1), keys.get("position_buckets", -1)
        max_distance = keys.size("max_relative_positions") if farthest != -1 else most
        num_buckets = keys.size("position_buckets", low=2) if buckets not in (-1, 0) else 0
        norms = [name.strip() for name in str(keys.get("norm_rel_ebd", "none")).lower().split("|")]
        keys.size("pooler_hidden_size", D)
        dense: dict[str, Any] = {
            "dense": "pooler.dense",
            "between": keys.choice("pooler_hidden_act", POOLER_ACTIVATIONS, "gelu"),
        }
        return plain.extended(
            DebertaConfig,
            labels=read_labels(keys, plain.architecture, of="cls", **dense),
            kinds=kinds,
            span=num_buckets or max_distance,
            num_buckets=num_buckets,
            max_distance=max_distance,
            shares_projections=keys.flag("share_att_key"),
            norms_positions="layer_norm" in norms,
        )

    def __init__(self, config: DebertaConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        encoder, D = self.config.names.layers.removesuffix(".layer"), config.hidden_size
        relative_PD = weights.matrix(f"{encoder}.rel_embeddings", 2 * config.span, D)
        if config.norms_positions:
            relative_PD = weights.layer_norm(f"{encoder}.LayerNorm", D, config.norm_eps)(relative_PD)
        positions = config.positions_of(config.max_position_embeddings).to(relative_PD.device)
        for layer in self.layers:
            layer.relative_PD, layer.positions = relative_PD, positions
        if config.labels is None:
            weights.tensors.leave_out("pooler.")
