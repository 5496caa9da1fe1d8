"""Llama (arXiv 2302.13971 and 2407.21783), and models of the same architecture."""

from __future__ import annotations

from octavo.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    pass
