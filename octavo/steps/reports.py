"""How executors report log-probabilities: int32 rows of fixed width, floats by their bits.

Shapes: R rows, W numbers of a report, n most likely tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HEAD = 2
"""Numbers in front of the most likely tokens: log-probability and rank of the token itself."""


def report_width(num_top: int) -> int:
    """Numbers of a report with so many most likely tokens."""
    return HEAD + 2 * num_top


def as_rows(reports: bytes, num_rows: int) -> npt.NDArray[np.int32]:
    """The reports [R, W] of these bytes."""
    return np.frombuffer(reports, dtype=np.int32).reshape(num_rows, -1)
