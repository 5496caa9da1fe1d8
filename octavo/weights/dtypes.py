"""The dtype of unquantised weights, by the names that configurations have for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stated_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a ``config.json`` says the weights have, ``None`` if it names none of ``DTYPES``."""
    return DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
