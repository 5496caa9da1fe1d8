"""Training with the engine's own numbers; see ``Policy`` and ``forward``."""

from octavo.train.policy import Policy, forward

__all__ = ["Policy", "forward"]
