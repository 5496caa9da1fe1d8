"""What some requests want of a step beside a token: penalties, biases, bans, and log-probabilities to report.

The device keeps by cell which tokens a sequence has, its biases and its bans. Tokens are remembered as they pass
through steps; the host tells only those that did not, say because the prefix cache had their keys and values.

Shapes: T rows, S sequences, C cells and that of padding, L positions, B biases, E bans, W numbers of a report, V
vocabulary, n likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.adjust_logits import Adjustments
from octavo.ops.sample import BANNED
from octavo.runtime.cells import MAX_BANS, MAX_BIASES, Cells
from octavo.runtime.step_inputs import DeviceStep, ExtraInputs, HostStep
from octavo.sampling_params import MAX_LOGPROBS
from octavo.types import Plan, Sequence, TokenLogprobs

NOBODY = -1
"""As an index of a cell: the last one, that of padding, in which there is nothing."""
HEAD = 2
"""Numbers of a report in front of the likeliest tokens: log-probability and rank of the token itself."""


class ExtraTables:
    """What the device keeps by cell, and what it reports."""

    def __init__(self, num_cells: int, max_len: int, most_seqs: int, vocab_size: int, device: torch.device) -> None:
        C, self._num_likeliest = num_cells + 1, min(MAX_LOGPROBS, vocab_size)
        self._histories_CL = torch.zeros(C, max_len, dtype=torch.int32, device=device)
        self._bias_ids_CB = torch.full((C, MAX_BIASES), -1, dtype=torch.int32, device=device)
        self._biases_CB = torch.zeros(C, MAX_BIASES, device=device)
        self._banned_ids_CE = torch.full((C, MAX_BANS), -1, dtype=torch.int32, device=device)
        self._masks_S0 = torch.zeros(most_seqs, 0, dtype=torch.uint8, device=device)
        self._has_mask_S = torch.zeros(most_seqs, dtype=torch.bool, device=device)
        width = HEAD + 2 * self._num_likeliest
        self.reports_SW = torch.zeros(most_seqs, width, dtype=torch.int32, device=device)
        """Of each sequence that wants it: log-probability, rank, likeliest tokens, their log-probabilities."""

    # ---- in the step, on the device

    def remember(self, step: DeviceStep, extras: ExtraInputs) -> None:
        """Put the step's tokens into the histories of their sequences."""
        self._histories_CL[extras.row_cells_T, step.positions_T] = step.token_ids_T.int()

    def adjust(self, logits_SV: Tensor, step: DeviceStep, extras: ExtraInputs) -> Tensor:
        """Logits as the requests want them; see ``ops.adjust_logits``."""
        S = len(logits_SV)
        return ops.adjust_logits(
            logits_SV,
            Adjustments(
                self._histories_CL,
                extras.history_S,
                step.params.position,
                extras.num_prompt_tokens_S,
                extras.repetition_S,
                extras.frequency_S,
                extras.presence_S,
                self._bias_ids_CB[extras.bias_cells_S],
                self._biases_CB[extras.bias_cells_S],
                self._banned_ids_CE[extras.ban_cells_S],
                self._masks_S0[:S],
                self._has_mask_S[:S],
            ),
        )

    def report(self, logits_SV: Tensor, tokens_S: Tensor, extras: ExtraInputs) -> None:
        """Take down the log-probabilities that sequences want of the logits as the model gave them."""
        wanted_S = tokens_S.masked_fill(extras.wants_logprobs_S == 0, -1)
        found = ops.token_logprobs(logits_SV, wanted_S, self._num_likeliest)
        numbers = (found.logprob_R.view(torch.int32).unsqueeze(1), found.rank_R.unsqueeze(1))
        likeliest = (found.top_ids_Rn, found.top_logprobs_Rn.contiguous().view(torch.int32))
        torch.cat((*numbers, *likeliest), dim=1, out=self.reports_SW[: len(tokens_S)])

    # ---- from the host, in front of the step on its stream

    def tell(self, plan: Plan, cells: Cells, of_seq: Many[int]) -> None:
        """Send what the device lacks of the plan's sequences, whose cells are ``of_seq``."""
        for item, cell in zip(plan, of_seq, strict=True):
            if not cells.has_extras[cell]:
                continue
            told = cells.num_told[cell]
            if told < 0:
                self._tell_lists(cell, item.seq)
                told = 0
            if told < item.start and cells.has_penalties[cell]:
                missing = [-1 if token is None else token for token in item.seq.tokens[told : item.start]]
                _send(missing, self._histories_CL[cell, told : item.start])
            cells.num_told[cell] = item.start + len(item.tokens)

    def _tell_lists(self, cell: int, seq: Sequence) -> None:
        params = seq.request.params
        biases = {**params.logit_bias, **dict.fromkeys((s[-1] for s in seq.request.banned_sequences), BANNED)}
        if biases:
            padding = MAX_BIASES - len(biases)
            _send([*biases, *[-1] * padding], self._bias_ids_CB[cell])
            _send([*biases.values(), *[0.0] * padding], self._biases_CB[cell])
        if params.min_tokens:
            _send([*seq.stop_token_ids, *[-1] * (MAX_BANS - len(seq.stop_token_ids))], self._banned_ids_CE[cell])


def _send(values: Many[float], to: Tensor) -> None:
    """One copy that nobody waits for."""
    to.copy_(torch.tensor(values, dtype=to.dtype, pin_memory=to.is_cuda), non_blocking=True)


def pack_extras(host: HostStep, plan: Plan, cells: Cells, of_seq: npt.NDArray[np.int64]) -> None:
    """Write what a plan's sequences, whose cells are ``of_seq``, want beside tokens; of S what is not in the plan."""
    samples = np.array([item.samples for item in plan], dtype=np.bool_)
    counts = np.array([len(item.tokens) for item in plan], dtype=np.int64)
    ends = np.array([item.start for item in plan], dtype=np.int64) + counts
    remembers = cells.has_penalties[of_seq]
    is_short = ends < cells.free_to_stop_at[of_seq]
    host.fill("row_cells", np.repeat(np.where(remembers, of_seq, NOBODY), counts), NOBODY)
    host.fill("history", np.where(remembers & samples, of_seq, NOBODY), NOBODY)
    host.fill("bias_cells", np.where(cells.has_biases[of_seq], of_seq, NOBODY), NOBODY)
    host.fill("ban_cells", np.where(is_short, of_seq, NOBODY), NOBODY)
    host.fill("num_prompt_tokens", cells.num_prompt_tokens[of_seq], 0)
    host.fill("repetition", cells.repetition[of_seq], 1)
    host.fill("frequency", cells.frequency[of_seq], 0)
    host.fill("presence", cells.presence[of_seq], 0)
    host.fill("wants_logprobs", cells.wants_logprobs[of_seq] & samples, 0)


def read_report(token: int, report_W: npt.NDArray[np.int32], count: int) -> TokenLogprobs:
    """What a sequence's report says of its token and of the ``count`` likeliest."""
    end = HEAD + (len(report_W) - HEAD) // 2
    logprobs_W = report_W.view(np.float32)
    return TokenLogprobs(
        token,
        float(logprobs_W[0]),
        int(report_W[1]),
        report_W[HEAD:end][:count].tolist(),
        logprobs_W[end:][:count].tolist(),
    )
