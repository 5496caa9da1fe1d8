"""``adjust_logits`` in compiled code, a row at a time on each thread.

Within a row a banned token is at minus infinity, which no other adjustment changes.

Shapes: R rows, V vocabulary, L longest history, B biases, E banned ids, W bytes of a mask.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.sampling.sampling import BANNED, OVERFLOWN, Adjustments, adjust_logits
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import compiled, rarely_used, task
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, int_bits, keep, read, view
from octavo_kernels.cpu.sampling.sort_keys import ALL_BUT_SIGN

LEAST, MOST, NEVER = np.float32(BANNED), np.float32(OVERFLOWN), np.float32(-math.inf)
NOT_A_NUMBER, ONE, ZERO = np.float32(math.nan), np.float32(1), np.float32(0)
INFINITY_BITS = np.int32(0x7F800000)
ARGUMENTS = fields(
    "task R piece V L B E W given adjusted history slot length num_prompt_tokens repetition frequency presence "
    "bias_ids bias banned_ids mask has_mask"
)  # fmt: skip
"""Sizes, addresses of logits, and those of the fields of ``Adjustments`` in their order."""


@rarely_used
@task
def _task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    slot, length = view(a.slot, a.R, np.int32), view(a.length, a.R, np.int32)
    num_prompt_tokens, has_mask = view(a.num_prompt_tokens, a.R, np.int32), view(a.has_mask, a.R, np.uint8)
    repetition, frequency = view(a.repetition, a.R, np.float32), view(a.frequency, a.R, np.float32)
    presence = view(a.presence, a.R, np.float32)
    for r in range(begin, end):
        given, x = view(a.given + 4 * r * a.V, a.V, np.float32), view(a.adjusted + 4 * r * a.V, a.V, np.float32)
        x[:] = given
        if has_mask[r]:
            keep_allowed(x, view(a.mask + r * a.W, a.W, np.uint8))
        banned = view(a.banned_ids + 4 * r * a.E, a.E, np.int32)
        for i in range(a.E):
            if 0 <= banned[i] < a.V:
                x[banned[i]] = NEVER
        ids, bias = view(a.bias_ids + 4 * r * a.B, a.B, np.int32), view(a.bias + 4 * r * a.B, a.B, np.float32)
        for i in range(a.B):
            if 0 <= ids[i] < a.V:
                x[ids[i]] += NEVER if bias[i] == LEAST else bias[i]
        if slot[r] >= 0:
            tokens = view(a.history + 4 * slot[r] * a.L, length[r], np.int32)
            penalize(x, tokens, num_prompt_tokens[r], repetition[r], frequency[r], presence[r])
        finish(x, given)


@compiled
def keep_allowed(x: Any, mask: Any) -> None:
    """Ban tokens whose bit is not set, and those beyond the mask."""
    reached = min(len(x), 8 * len(mask))
    for byte in range(reached // 8):
        if mask[byte] != 0xFF:
            eight, bits = x[8 * byte : 8 * byte + 8], np.int32(mask[byte])
            for i in range(8):
                eight[i] = eight[i] if bits >> i & 1 else NEVER
    for i in range(reached // 8 * 8, reached):
        if not mask[i // 8] >> (i % 8) & 1:
            x[i] = NEVER
    x[reached:] = NEVER


@compiled
def penalize(x: Any, tokens: Any, num_prompt_tokens: int, repetition: Any, frequency: Any, presence: Any) -> None:
    """Apply the penalties for ``tokens``, those of the prompt first, in place."""
    seen = np.zeros(len(x), np.int32)
    if repetition != ONE:
        for token in tokens:
            if 0 <= token < len(x) and seen[token] == 0:
                x[token] = x[token] / repetition if x[token] > ZERO else x[token] * repetition
                seen[token] = -1
    if frequency != ZERO or presence != ZERO:
        output = tokens[num_prompt_tokens:]
        for token in output:
            if 0 <= token < len(x):
                seen[token] = max(seen[token], 0) + 1
        for token in output:
            if 0 <= token < len(x) and seen[token] > 0:
                x[token] -= np.float32(seen[token]) * frequency + presence
                seen[token] = 0
    keep(seen)


@compiled
def finish(x: Any, given: Any) -> None:
    """Bring everything into range; what was not finite becomes no number."""
    widest = np.int32(0)
    for i in range(len(x)):
        x[i] = min(max(x[i], LEAST), MOST)
        widest = max(widest, int_bits(given[i]) & ALL_BUT_SIGN)
    if widest >= INFINITY_BITS:
        for i in range(len(x)):
            if not math.isfinite(given[i]):
                x[i] = NOT_A_NUMBER


@adjust_logits.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: missing(FLOAT_FEATURES))
def adjust_logits_numba(logits_RV: Tensor, adjustments: Adjustments) -> Tensor:
    """See ``ops.adjust_logits``."""
    given_RV = logits_RV.float().contiguous()
    adjusted_RV, (R, V) = torch.empty_like(given_RV), given_RV.shape
    held = [field.contiguous() for field in adjustments]
    lists = (adjustments.history_SL, adjustments.bias_ids_RB, adjustments.banned_ids_RE, adjustments.mask_RW)
    addresses = (given_RV.data_ptr(), adjusted_RV.data_ptr(), *(field.data_ptr() for field in held))
    call(task_driver(), ARGUMENTS, (_task(), R, 1, V, *(ids.shape[1] for ids in lists), *addresses))
    return adjusted_RV
