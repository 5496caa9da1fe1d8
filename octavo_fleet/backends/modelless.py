"""What engines without a model say of themselves, of their tokens, and of requests that need a model."""

from __future__ import annotations

from octavo.errors import InvalidParameter
from octavo.types import EngineInfo, Request, TokenLogprobs

IMPOSSIBLE = -9999.0
"""The log-probability of tokens that are never sampled; minus infinity is not JSON."""


def certain(token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities where ``token`` is the only one possible."""
    top = [token, *(other for other in range(num_top + 1) if other != token)][:num_top]
    return TokenLogprobs(token, 0.0, 1, top, [0.0 if other == token else IMPOSSIBLE for other in top])


def refuse_what_needs_a_model(request: Request) -> None:
    """Raise ``InvalidParameter`` for results that only a model can give."""
    if request.params.grammar is not None:
        raise InvalidParameter("response_format", "This backend has no model, so it does no structured output.")
    if request.params.extra_args is not None:
        raise InvalidParameter("extra_args", "This backend has no model, so it has no logits processors.")
    if request.params.prompt_logprobs is not None:
        raise InvalidParameter("prompt_logprobs", "This backend has no model, so prompts have no log-probabilities.")


def make_info(
    name: str,
    *,
    vocab_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int = 0,
    block_size: int = 16,
    num_kv_blocks: int = 0,
) -> EngineInfo:
    """The properties of an engine without a model."""
    return EngineInfo(
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(),
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or max_num_seqs,
        architecture=name,
        num_parameters=0,
        dtype="float32",
        device="cpu",
        memory={},
        kernels={},
    )
