"""Operations on tensors: each a contract and its plain-torch reference, in a file by theme; see ``dispatch``."""

from octavo.ops.activation import (
    add_scaled,
    clamped_swish,
    gelu,
    gelu_and_mul,
    scaled,
    sigmoid_and_mul,
    silu_and_mul,
    softcap,
    squared_relu,
)
from octavo.ops.attention.attention import (
    apply_rope,
    attention,
    axis_angles,
    encoder_attention,
    paged_attention,
    rotary_angles,
    store_keys,
    store_kv,
)
from octavo.ops.attention.choose_blocks import choose_blocks
from octavo.ops.attention.choose_head_blocks import choose_head_blocks
from octavo.ops.attention.choose_keys import choose_keys
from octavo.ops.attention.compressed_attention import choose_entries, compress, compressed_attention, turn_tails
from octavo.ops.attention.latent_attention import latent_attention, store_latents
from octavo.ops.attention.partial_attention import merge_parts, partial_attention, partial_latent_attention
from octavo.ops.drafting import accept_by_chance, accept_drafts, draft_rows, drafts_behind, keep_draft, newest_tokens
from octavo.ops.embedding import embedding, local_vocab_ids, mask_remote_rows
from octavo.ops.hyper_connections import attend_streams, enter_streams, last_streams, leave_streams
from octavo.ops.linear.block_linear import block_embedding, block_linear
from octavo.ops.linear.grouped_linear import grouped_linear, grouped_output_mlp
from octavo.ops.linear.linear import concat, head_linear, linear, lora, put_columns, stacked_lora
from octavo.ops.linear.scaled_linear import scaled_linear
from octavo.ops.linear.sliced_linear import sliced_linear
from octavo.ops.moe import grouped_moe, keep_routes, local_expert_ids, moe, route, sum_over_experts
from octavo.ops.norms import layer_norm, rms_norm
from octavo.ops.recurrent.causal_conv import causal_conv
from octavo.ops.recurrent.gated_conv import gated_conv
from octavo.ops.recurrent.gated_delta import gated_delta
from octavo.ops.recurrent.gated_norm import gated_norm
from octavo.ops.recurrent.linear_attention import linear_attention
from octavo.ops.recurrent.selective_scan import selective_scan
from octavo.ops.recurrent.state_space import state_space
from octavo.ops.sampling.sampling import adjust_logits, processed_logits, sample, token_logprobs
from octavo.ops.stepping import next_tokens, publish_tokens, pull_step, stage_step
