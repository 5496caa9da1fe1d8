"""Format in which executors report log-probabilities: int32 rows of fixed width, with floats reinterpreted as int32.

Shapes: R rows, W numbers of a report, n most likely tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HEAD = 2
"""Numbers before the most likely tokens: log-probability and rank of the token itself."""


def report_width(num_top: int) -> int:
    """Width W of a report with ``num_top`` most likely tokens."""
    return HEAD + 2 * num_top


def as_rows(reports: bytes, num_rows: int) -> npt.NDArray[np.int32]:
    """View ``reports`` as an array [R, W]."""
    return np.frombuffer(reports, dtype=np.int32).reshape(num_rows, -1)
