"""GLM-4 (arXiv 2406.12793): adjacent pairs rotated in half of each head, and fused gate and up projections.

The later checkpoints, ``Glm4``, also have norms after attention and MLP.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.parts import DecoderConfig, Names

GLM = Names(ups=("mlp.gate_up_proj",))
GLM4 = GLM._replace(
    after_attention="post_self_attn_layernorm", before_mlp="post_attention_layernorm", after_mlp="post_mlp_layernorm"
)


class GlmForCausalLM(Decoder):
    names = GLM

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        has_bias = keys.flag("attention_bias", True)
        config = read_decoder(
            keys, max_len, eps=1.5625e-7, head_dim=128, rotary=0.5, has_bias=has_bias, names=cls.names
        )
        return config.with_attention(is_adjacent=True, has_output_bias=False)


class Glm4ForCausalLM(GlmForCausalLM):
    names = GLM4
