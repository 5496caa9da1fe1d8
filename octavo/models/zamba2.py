"""Zamba2 (arXiv 2411.15242): layers of Mamba-2, and in some of them the result of attention and a feed-forward layer
whose weights these layers share in turn, each with low-rank changes of its own.

Shapes: T tokens of the step, D model, N heads, H head dim, F ffn.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from octavo import ops
from octavo.layers.attention import attention
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.linear import Linear
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward, no_feed_forward
from octavo.models.hybrid import LINEAR, MambaSizes, layer_kinds, load_mamba2
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.model_config import ACTIVATIONS
from octavo.models.parts import DecoderConfig, MLPPart, Names
from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows
from octavo.quant.stored.shard import Section

HYBRID = "hybrid"
OLD_NAMES = {"mamba": LINEAR}
MAMBA_NORM_EPS = 1e-5
"""Of the norm behind the recurrence, independent of ``rms_norm_eps``."""
NAMES = Names(norm="model.final_layernorm", before_mlp=None)
UNUSED = (
    *("attention_hidden_size", "attention_head_dim", "mamba_headdim", "kv_channels", "num_query_groups"),
    *("hybrid_layer_ids", "ffn_hidden_size", "gated_linear_unit", "use_mem_eff_path", "use_mamba_kernels"),
    *("chunk_size", "num_logits_to_keep", "time_step_max", "time_step_floor", "use_conv_bias"),
    *("layers_block_type", "layer_types"),
)
"""Keys that follow from others, of training, of other implementations, and one that none reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zamba2Config(DecoderConfig):
    mamba: MambaSizes
    kinds: tuple[str, ...]
    num_blocks: int
    """Sets of shared weights, which layers that have any use in turn."""
    rank: int
    """Of each layer's own changes of shared weights."""
    changes_attention: bool
    """Whether layers change the shared queries, keys and values, besides the gates and ups."""

    @property
    def has_stages(self) -> bool:
        return False  # all layers see the embeddings

    @property
    def uses(self) -> list[int]:
        """The layers with shared weights."""
        return [i for i, kind in enumerate(self.kinds[: self.num_layers]) if kind == HYBRID]


class SharedBlock:
    """Attention over the residual stream beside the embeddings, then a feed-forward layer: both without residual."""

    def __init__(self, config: Zamba2Config, weights: WeightLoader, prefix: str, index: int) -> None:
        D, eps, part, mlp = (
            config.hidden_size,
            config.norm_eps,
            config.layers[index].attention,
            config.layers[index].mlp,
        )
        assert isinstance(mlp, MLPPart)
        assert isinstance(mlp.activation, str)
        layout = HeadLayout(part.num_heads, part.num_kv_heads, part.head_dim, part.scale)
        names = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        self.part, self.activation = part, mlp.activation
        self.norm, self.ffn_norm = (
            weights.norm(f"{prefix}.{name}", size, eps)
            for name, size in (("input_layernorm", 2 * D), ("pre_ff_layernorm", D))
        )
        self.qkv_proj = weights.qkv(names, layout, 2 * D)
        self.o_proj = weights.row(f"{prefix}.self_attn.o_proj", D, part.num_heads * part.head_dim)
        self.up = weights.gate_up([f"{prefix}.feed_forward.gate_up_proj"], mlp.size, D, mlp.has_bias)
        self.down = weights.row(f"{prefix}.feed_forward.down_proj", D, mlp.size, mlp.has_bias)
        self.heads = weights.own_heads(layout)


class Use:
    """A layer's use of a shared block, with its changes and the map of the result."""

    def __init__(
        self, config: Zamba2Config, weights: WeightLoader, index: int, block: SharedBlock, prefix: str
    ) -> None:
        """``prefix``: of the block's weights, among which those of the changes are."""
        D, rank, number, part = config.hidden_size, config.rank, config.uses.index(index), block.part
        width, lists = part.num_heads * part.head_dim, [f"{prefix}.self_attn.linear_{x}_adapter_list" for x in "qkv"]
        self.block, self.qkv_changes = block, list[Linear]()
        if config.changes_attention:
            self.qkv_down = weights.fused([MatrixRows(f"{x}.{number}.0", [Section(rank, 1)]) for x in lists], 2 * D)
            self.qkv_changes = [weights.column(f"{x}.{number}.1", width, rank, num_heads=part.num_heads) for x in lists]
        name = f"{prefix}.feed_forward.gate_up_proj_adapter_list.{number}"
        self.up_down = weights.replicated(f"{name}.0", rank, D)
        self.up_change = weights.gate_up([f"{name}.1"], config.ffn_size, rank)
        self.linear = weights.replicated(f"{config.names.layers}.{index}.linear", D, D)

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """What is added to the input of the layer's recurrence, a new tensor [T, D]."""
        assert step.embedded_TD is not None
        block, (cos_TR, sin_TR) = self.block, step.of(self.block.part.rope)
        h_T2D = block.norm(ops.concat(x_TD, step.embedded_TD))
        qkv_TW = block.qkv_proj(h_T2D)
        if self.qkv_changes:
            low = self.qkv_down(h_T2D).chunk(3, dim=-1)
            changes = [up(ops.concat(part)) for up, part in zip(self.qkv_changes, low, strict=True)]
            qkv_TW = ops.scaled(ops.concat(*changes), 1.0, qkv_TW)
        attended_TN = attention(qkv_TW, block.heads, cos_TR, sin_TR, cache, rows)
        h_TD = block.ffn_norm(block.o_proj(attended_TN))
        gate_up_T2F = self.up_change(self.up_down(h_TD), residual=block.up(h_TD))
        if block.activation == "silu":
            h_TF = ops.silu_and_mul(gate_up_T2F)
        else:
            h_TF = ops.gelu_and_mul(gate_up_T2F, block.activation == "gelu_tanh")
        return self.linear(block.down(h_TF))


class Zamba2Layer(DecoderLayer):
    """``x + mamba(norm(x + use))``, without ``use`` in most layers."""

    use: Use | None = None

    def __init__(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, Zamba2Config)
        super().__init__(config, weights, f"{prefix}.mamba_decoder" if index in config.uses else prefix, index)

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, Zamba2Config)
        D, name, sizes = config.hidden_size, f"{prefix}.mamba", config.mamba
        self.mamba = load_mamba2(weights, name, sizes, D, self.input_norm, MAMBA_NORM_EPS)
        self.o_proj = weights.row(f"{name}.out_proj", D, sizes.inner, sizes.has_bias)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        return no_feed_forward

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.use is not None:
            x_TD = ops.scaled(self.use(x_TD, step, cache, rows), 1.0, x_TD)
        return self.mamba(x_TD, cache, rows)


class Zamba2ForCausalLM(Decoder):
    layer_class = Zamba2Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        num_layers, D, N = (keys.size(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        listed = keys.get("layers_block_type") or keys.get("layer_types")
        kinds = [OLD_NAMES.get(str(kind), kind) for kind in listed] if isinstance(listed, list | tuple) else listed
        kinds = layer_kinds(ConfigKeys({"layers_block_type": kinds}), "layers_block_type", (LINEAR, HYBRID), num_layers)
        if 2 * D % N:
            raise wrong("num_attention_heads", N, f"a divisor of twice hidden_size, {2 * D}")
        if keys.flag("use_long_context"):
            raise wrong("use_long_context", True, "false")
        has_bias, own = keys.flag("add_bias_linear"), keys.over({**keys.values, "head_dim": 2 * D // N})
        config = read_decoder(
            own,
            max_len,
            tied=True,
            eps=1e-5,
            ffn_size=4 * D,
            activation="gelu",
            activations=ACTIVATIONS,
            windows=NO_WINDOWS,
            has_bias=False,
            mlp_bias=has_bias,
            names=NAMES,
        )
        rope, changes = 0 if keys.flag("use_mem_rope") else None, keys.flag("use_shared_attention_adapter")
        if changes and config.num_kv_heads != N:
            raise wrong("num_key_value_heads", config.num_kv_heads, f"num_attention_heads, {N}, with adapters")
        config = config.with_attention(rope=rope, scale=(config.head_dim / 2) ** -0.5)
        config = config if rope is not None else config.without_rope()
        keys.pass_over(*UNUSED)
        mamba = _read_mamba(keys, D, has_bias)
        of_attention = LayerCacheSpec(config.num_kv_heads, config.head_dim, state=mamba.cache.state)
        config = config.with_caches([of_attention if kind == HYBRID else mamba.cache for kind in kinds])
        return config.extended(
            Zamba2Config,
            mamba=mamba,
            kinds=kinds,
            num_blocks=keys.size("num_mem_blocks", 1),
            rank=keys.size("adapter_rank", 128),
            changes_attention=changes,
        )

    def __init__(self, config: Zamba2Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        blocks: dict[str, SharedBlock] = {}
        for number, index in enumerate(config.uses):
            first, own = config.uses[number % config.num_blocks], f"{config.names.layers}.{index}.shared_transformer"
            if not config.tie_word_embeddings and weights.tensors.has(f"{own}.input_layernorm.weight"):
                first = index  # transformers ties blocks only along with the embeddings
                others = "self_attn.linear_", "feed_forward.gate_up_proj_adapter_list."  # changes of other layers
                weights.tensors.leave_out(*(f"{own}.{other}" for other in others))
            prefix = f"{config.names.layers}.{first}.shared_transformer"
            if prefix not in blocks:
                blocks[prefix] = SharedBlock(config, weights, prefix, index)
            layer = self.layers[index]
            assert isinstance(layer, Zamba2Layer)
            layer.use = Use(config, weights, index, blocks[prefix], prefix)
            if index != first:  # the same weights once more
                weights.tensors.leave_out(f"{own}.")

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        return super().step(token_ids_T, positions_T, x_TD, rows)._replace(embedded_TD=ops.concat(x_TD))


def _read_mamba(keys: ConfigKeys, hidden_size: int, has_bias: bool) -> MambaSizes:
    heads, inner = keys.size("n_mamba_heads", 8), keys.size("mamba_expand", 2) * hidden_size
    groups = keys.size("mamba_ngroups", 1)
    if inner % heads:
        raise wrong("n_mamba_heads", heads, f"a divisor of mamba_expand * hidden_size, {inner}")
    if heads % groups:
        raise wrong("mamba_ngroups", groups, f"a divisor of n_mamba_heads, {heads}")
    return MambaSizes(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=groups,
        state_size=keys.size("mamba_d_state", 64),
        width=keys.size("mamba_d_conv", 4, low=2),
        has_conv_bias=True,
        has_bias=has_bias,
        limits=(keys.number("time_step_min", 0.001), math.inf),
    )
