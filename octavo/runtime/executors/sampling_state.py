"""Per-sequence sampling state by batch index, kept between steps: last tokens, token histories, biases and bans.

Steps write their own tokens to the histories; messages carry only tokens that no step computes, such as those whose
keys and values came from the prefix cache.

Shapes: T rows, R sampled rows, C batch indices plus one for padding, L positions, B biases, E stop tokens, W bytes of a
mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.sampling.sampling import BANNED, Adjustments
from octavo.ops.stepping import LastResults
from octavo.runtime.executors.step_views import ExtraInputs, StepTensors
from octavo.runtime.sharded_logits import WHOLE, ShardedVocabulary
from octavo.sampling_params import MAX_LOGPROBS
from octavo.steps.limits import MAX_BIASES, MAX_STOPS
from octavo.steps.messages import History, Mask, TokenLists


class SamplingState:
    """Sampling state in tensors of fixed size on one device."""

    def __init__(
        self,
        num_indices: int,
        max_len: int,
        most_rows: int,
        vocab_size: int,
        device: torch.device,
        num_drafts: int = 0,
        vocabulary: ShardedVocabulary = WHOLE,
    ) -> None:
        """``most_rows``: most sampled rows of a step; ``max_len``: most positions of a sequence; ``num_drafts``: those
        of a drafter."""
        C = num_indices + 1
        self.vocab_size = vocab_size
        self.vocabulary = vocabulary
        self.last_tokens_C = torch.zeros(C, dtype=torch.int32, device=device)
        """The last sampled token of each sequence."""
        self.last_positions_C = torch.full((C,), -1, dtype=torch.int32, device=device)
        """Its position; -1 if the last step failed."""
        self.drafts_CK = torch.zeros(C, num_drafts, dtype=torch.int32, device=device) if num_drafts else None
        """What the drafter proposes behind it."""
        self.histories_CL = torch.zeros(C, max_len, dtype=torch.int32, device=device)
        self._bias_ids_CB = torch.full((C, MAX_BIASES), -1, dtype=torch.int32, device=device)
        self._biases_CB = torch.zeros(C, MAX_BIASES, device=device)
        self._stop_ids_CE = torch.full((C, MAX_STOPS), -1, dtype=torch.int32, device=device)
        self._no_masks_R0 = torch.zeros(most_rows, 0, dtype=torch.uint8, device=device)
        self._has_mask_R = torch.zeros(most_rows, dtype=torch.bool, device=device)
        self.most_top = min(MAX_LOGPROBS, vocab_size)
        """Largest number of most likely tokens that a report holds."""

    # ---- before a step

    def update(self, histories: Sequence[History], lists: Sequence[TokenLists]) -> None:
        """Store the token histories and lists that a step message carries for its sequences."""
        first = self.vocabulary.first
        for own in lists:
            biases = {**own.bias, **dict.fromkeys(own.banned, BANNED)}
            padding = MAX_BIASES - len(biases)
            _send([*(token - first for token in biases), *[-1] * padding], self._bias_ids_CB[own.index])
            _send([*biases.values(), *[0.0] * padding], self._biases_CB[own.index])
            _send(
                [*(token - first for token in own.stops), *[-1] * (MAX_STOPS - len(own.stops))],
                self._stop_ids_CE[own.index],
            )
        for history in histories:
            end = history.start + len(history.tokens)
            _send([token - first for token in history.tokens], self.histories_CL[history.index, history.start : end])

    def forget_results(self, batch_indices: Sequence[int]) -> None:
        """Record that a step of these sequences failed: what their next steps assume about it does not hold."""
        self.last_positions_C[list(batch_indices)] = -1

    # ---- in a step

    def stage(self, step: StepTensors, block_size: int) -> None:
        """Complete the step's tensors with what earlier steps gave; see ``ops.stage_step``."""
        last = LastResults(self.last_tokens_C, self.last_positions_C, self.drafts_CK)
        ops.stage_step(step.token_ids_T, step.staged, last, step.packed_tables, step.width, step.tables_GSB, block_size)

    def remember(self, step: StepTensors, extras: ExtraInputs) -> None:
        """Write the step's tokens to the histories of their sequences."""
        self.histories_CL[extras.row_indices_T, step.positions_T] = step.token_ids_T.sub(self.vocabulary.first).int()

    def keep(self, step: StepTensors, tokens_R: Tensor, num_accepted_S: Tensor | None) -> None:
        """Keep each sequence's last token and its position for its next step."""
        if num_accepted_S is None or step.cu_samples is None:
            last_tokens_S, last_positions_S = tokens_R, step.params.position
        else:
            last_S = (step.cu_samples[:-1] + num_accepted_S).clamp(0, len(tokens_R) - 1)
            last_tokens_S, last_positions_S = tokens_R[last_S], step.params.position[last_S]
        self.last_tokens_C[step.batch_indices_S] = last_tokens_S
        self.last_positions_C[step.batch_indices_S] = last_positions_S

    def adjust(self, logits_RV: Tensor, step: StepTensors, extras: ExtraInputs, masks: Sequence[Mask] = ()) -> Tensor:
        """Logits after penalties, biases, bans and masks; see ``ops.adjust_logits``."""
        masks_RW, has_mask_R = self._masks(masks, logits_RV)
        ban_indices_R = extras.ban_indices_R.masked_fill(step.params.position >= extras.min_stops_R, -1)
        return ops.adjust_logits(
            logits_RV,
            Adjustments(
                self.histories_CL,
                extras.history_indices_R,
                step.params.position,
                extras.num_prompt_tokens_R,
                extras.repetition_R,
                extras.frequency_R,
                extras.presence_R,
                self._bias_ids_CB[extras.bias_indices_R],
                self._biases_CB[extras.bias_indices_R],
                self._stop_ids_CE[ban_indices_R],
                masks_RW,
                has_mask_R,
            ),
        )

    def _masks(self, masks: Sequence[Mask], logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        R = len(logits_RV)
        if not masks and len(self._has_mask_R) >= R:
            return self._no_masks_R0[:R], self._has_mask_R[:R]
        width = len(self.vocabulary.mask_bits(masks[0].bits)) if masks else 0
        masks_RW = torch.zeros(R, width, dtype=torch.uint8)
        has_mask_R = torch.zeros(R, dtype=torch.bool)
        for mask in masks:
            masks_RW[mask.row] = torch.frombuffer(bytearray(self.vocabulary.mask_bits(mask.bits)), dtype=torch.uint8)
            has_mask_R[mask.row] = True
        return masks_RW.to(logits_RV.device), has_mask_R.to(logits_RV.device)


def _send(values: Sequence[float], to: Tensor) -> None:
    """Copy values to a tensor, without blocking the host."""
    to.copy_(torch.tensor(values, dtype=to.dtype, pin_memory=to.is_cuda), non_blocking=True)
