"""Operations on tensors: one file each, holding the contract and its plain-torch reference; see ``dispatch``."""

from octavo.ops.accept_by_chance import accept_by_chance
from octavo.ops.accept_drafts import accept_drafts
from octavo.ops.adjust_logits import adjust_logits
from octavo.ops.apply_rope import apply_rope
from octavo.ops.attention import attention
from octavo.ops.block_embedding import block_embedding
from octavo.ops.block_linear import block_linear
from octavo.ops.causal_conv import causal_conv
from octavo.ops.concat import concat
from octavo.ops.draft_rows import draft_rows
from octavo.ops.drafts_behind import drafts_behind
from octavo.ops.embedding import embedding
from octavo.ops.encoder_attention import encoder_attention
from octavo.ops.gated_conv import gated_conv
from octavo.ops.gated_delta import gated_delta
from octavo.ops.gated_norm import gated_norm
from octavo.ops.gelu import gelu
from octavo.ops.gelu_and_mul import gelu_and_mul
from octavo.ops.grouped_linear import grouped_linear
from octavo.ops.grouped_moe import grouped_moe
from octavo.ops.grouped_output_mlp import grouped_output_mlp
from octavo.ops.head_linear import head_linear
from octavo.ops.keep_draft import keep_draft
from octavo.ops.keep_own_rows import keep_own_rows
from octavo.ops.latent_attention import latent_attention
from octavo.ops.layer_norm import layer_norm
from octavo.ops.linear import linear
from octavo.ops.linear_attention import linear_attention
from octavo.ops.lora import lora
from octavo.ops.moe import moe
from octavo.ops.newest_tokens import newest_tokens
from octavo.ops.next_tokens import next_tokens
from octavo.ops.own_ids import own_ids
from octavo.ops.paged_attention import paged_attention
from octavo.ops.publish_tokens import publish_tokens
from octavo.ops.pull_step import pull_step
from octavo.ops.put_columns import put_columns
from octavo.ops.rms_norm import rms_norm
from octavo.ops.rotary_angles import axis_angles, rotary_angles
from octavo.ops.route import route
from octavo.ops.sample import sample
from octavo.ops.scaled_linear import scaled_linear
from octavo.ops.silu_and_mul import silu_and_mul
from octavo.ops.stacked_lora import stacked_lora
from octavo.ops.stage_step import stage_step
from octavo.ops.state_space import state_space
from octavo.ops.store_keys import store_keys
from octavo.ops.store_kv import store_kv
from octavo.ops.token_logprobs import token_logprobs

__all__ = [
    "accept_by_chance",
    "accept_drafts",
    "adjust_logits",
    "apply_rope",
    "attention",
    "axis_angles",
    "block_embedding",
    "block_linear",
    "causal_conv",
    "concat",
    "draft_rows",
    "drafts_behind",
    "embedding",
    "encoder_attention",
    "gated_conv",
    "gated_delta",
    "gated_norm",
    "gelu",
    "gelu_and_mul",
    "grouped_linear",
    "grouped_moe",
    "grouped_output_mlp",
    "head_linear",
    "keep_draft",
    "keep_own_rows",
    "latent_attention",
    "layer_norm",
    "linear",
    "linear_attention",
    "lora",
    "moe",
    "newest_tokens",
    "next_tokens",
    "own_ids",
    "paged_attention",
    "publish_tokens",
    "pull_step",
    "put_columns",
    "rms_norm",
    "rotary_angles",
    "route",
    "sample",
    "scaled_linear",
    "silu_and_mul",
    "stacked_lora",
    "stage_step",
    "state_space",
    "store_keys",
    "store_kv",
    "token_logprobs",
]
