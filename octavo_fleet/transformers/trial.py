"""Short texts on which the code that serves a model of the library is compared with the library's own.

Shapes: T rows, D model, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CANCELLATIONS, first_line_of
from octavo.ops.attention.attention import GroupRows, LayerCache, PagedRows
from octavo_fleet.transformers.paged import PagedTransformer

LENGTHS = (23, 9)
"""Tokens of the texts of a trial; the first has more where the model has windows."""
LONGEST_TRIAL = 1024
"""Windows that are wider are compared with the configuration alone."""
BLOCK = 4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of a trial, relative to the largest element, where the library itself rounds no worse."""
MOST_ROUNDING = 0.2
"""A larger difference is taken for another result."""

logger = logging.getLogger("octavo.start")


def trial_texts(config: Any, max_len: int, device: torch.device) -> list[Tensor]:
    """Two texts of random tokens, the first longer than each window up to ``LONGEST_TRIAL``."""
    generator = torch.Generator().manual_seed(0)
    window = getattr(config, "sliding_window", None)
    widths = [width for width in (window if isinstance(window, list | tuple) else [window]) if isinstance(width, int)]
    first, second = LENGTHS
    first += max((width for width in widths if width <= LONGEST_TRIAL), default=0)
    lengths = (min(first, max_len), second)
    return [torch.randint(config.vocab_size, (length,), generator=generator).to(device) for length in lengths]


def alone(model: Any, text_T: Tensor) -> tuple[Tensor, Tensor]:
    """The decoder's output and the logits for a text, by the library's own code."""
    ids = text_T.unsqueeze(0)
    output: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return output, logits


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def tolerance(model: Any, texts: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference from ``expected``, the decoder's outputs, that is rounding: twice what two ways to attend
    of the library differ by, which is much in a deep model of 16 bits."""
    dtype, before = expected[0].dtype, model.config._attn_implementation
    if dtype == torch.float32:
        return TOLERANCE[dtype]
    try:
        model.set_attn_implementation("sdpa" if before == "eager" else "eager")
        others = [alone(model, text)[0] for text in texts]
    except CANCELLATIONS:
        raise
    except BaseException as error:  # any error of the library's code
        logger.debug("%s attends in one way only: %s", type(model).__name__, error)
        return TOLERANCE[dtype]
    finally:
        model.set_attn_implementation(before)
    return min(max(TOLERANCE[dtype], 2 * difference(expected, others)), MOST_ROUNDING)


def over_blocks(paged: PagedTransformer, texts: Sequence[Tensor]) -> list[Tensor]:
    """The decoder's output for both texts: some tokens of the first, then the rest of it and the second in one pass but
    for its last token, then that."""
    first, second = (len(text) for text in texts)
    cut, last = max(first // 2, 1), second - 1
    caches = _empty_caches(paged, texts)
    parts: list[list[Tensor]] = [[], []]
    for spans in (((0, cut), (0, 0)), ((cut, first), (0, last)), ((first, first), (last, second))):
        chosen = [(index, end - start) for index, (start, end) in enumerate(spans) if end > start]
        ids_T, positions_T, rows = _pass(texts, spans)
        outputs = torch.split(paged.forward(ids_T, positions_T, caches, rows), [count for _, count in chosen])
        for (index, _), output in zip(chosen, outputs, strict=True):
            parts[index].append(output)
    return [torch.cat(part) for part in parts]


def why_not_captured(paged: PagedTransformer, texts: Sequence[Tensor]) -> str:
    """Why the model's passes cannot be CUDA graphs; empty if a captured one gives, for other tokens, what it should."""
    ids_T, positions_T, rows = _pass(texts, [(0, len(text)) for text in texts])
    caches, mode = _empty_caches(paged, texts), torch.cuda.get_sync_debug_mode()

    def compute() -> Tensor:
        return paged.logits(paged.forward(ids_T, positions_T, caches, rows))

    others_T = ids_T.flip(0)
    try:
        compute()  # compiles and allocates
        torch.cuda.set_sync_debug_mode("error")
        compute()  # a graph cannot wait for the device, and an attempt to capture what does leaves it in disorder
        torch.cuda.set_sync_debug_mode(mode)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found_TV = compute()
        ids_T.copy_(others_T)
        graph.replay()
        captured_TV = found_TV.clone()
        off = difference([compute()], [captured_TV])
    except CANCELLATIONS:
        raise
    except BaseException as error:  # any error of the library's code
        return first_line_of(error)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return "" if off < TOLERANCE[found_TV.dtype] else f"a captured pass differs by {off:.1g}"


def _empty_caches(paged: PagedTransformer, texts: Sequence[Tensor]) -> list[LayerCache]:
    num_blocks = sum(-(-len(text) // BLOCK) for text in texts)
    shapes = [(num_blocks, spec.num_kv_heads, BLOCK, spec.head_dim) for spec in paged.specs]
    return [LayerCache(paged.weight.new_zeros(shape), paged.weight.new_zeros(shape)) for shape in shapes]


def _pass(texts: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, PagedRows]:
    """Token ids [T], positions [T] and metadata of a pass over these spans, of which some may be empty; each text has
    blocks of its own."""
    device, widths = texts[0].device, [-(-len(text) // BLOCK) for text in texts]
    most = max(widths)
    tables = torch.tensor(
        [[sum(widths[:index]) + min(i, width - 1) for i in range(most)] for index, width in enumerate(widths)]
    )
    chosen = [(index, start, end) for index, (start, end) in enumerate(spans) if end > start]
    counts = [end - start for _, start, end in chosen]
    positions = torch.cat([torch.arange(start, end) for _, start, end in chosen])
    owners = torch.tensor([index for index, _, _ in chosen]).repeat_interleave(torch.tensor(counts))
    slots = tables[owners, positions // BLOCK] * BLOCK + positions % BLOCK
    rows = PagedRows(
        (GroupRows(slots.to(device), tables[[index for index, _, _ in chosen]].int().to(device)),),
        torch.tensor([0, *counts]).cumsum(0).int().to(device),
        torch.tensor([end for _, _, end in chosen]).int().to(device),
        max(counts),
    )
    ids = torch.cat([texts[index][start:end] for index, start, end in chosen])
    return ids, positions.to(device), rows
