"""Classification heads: from vectors of tokens to the logits of labels.

Shapes: R rows, S texts, T tokens, D model, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.layers.mlp import PlainActivation
from octavo.layers.norm import Norm
from octavo.model_info import LabelActivation
from octavo.models.config_keys import ConfigKeys, wrong

MOST_LABELS = 1 << 16
"""Far above any real model: names of labels are sent with what a model is."""


@dataclass(frozen=True, kw_only=True)
class LabelPart:
    """The head of a classifier; names are those in the checkpoint."""

    names: tuple[str, ...]
    """Of the labels."""
    activation: LabelActivation
    """What makes scores of the logits."""
    of: Literal["cls", "mean", "last", "each", "mean_logits"]
    """Whether a text's logits are those of its first token's vector, of the vectors' mean, of its last token's vector,
    or the mean of all its tokens' logits; "each": every token has logits."""
    dense: str = ""
    """A map between vectors of the model's width before that to the logits, if there is one."""
    dense_has_bias: bool = True
    between: PlainActivation | None = None
    """The function behind ``dense``."""
    norm: str = ""
    """The norm behind that."""
    out: str = "classifier"
    out_has_bias: bool = True
    tokens: tuple[int, int] | None = None
    """Without a map of its own: the score is how much larger the second token's logit is than the first one's."""


class LabelHead:
    """A classification head with its weights."""

    def __init__(self, part: LabelPart, dense: Linear | None, norm: Norm | None, out: Linear) -> None:
        self.part, self.dense, self.norm, self.out = part, dense, norm, out

    def __call__(self, x_RD: Tensor) -> Tensor:
        """The logits [R, L] of each row, float32."""
        if self.dense is not None:
            x_RD = self.dense(x_RD)
        if self.part.between is not None:
            x_RD = self.part.between(x_RD)
        if self.norm is not None:
            x_RD = self.norm(x_RD)
        logits_RL = self.out(x_RD).float()
        return logits_RL if self.part.tokens is None else logits_RL[:, 1:] - logits_RL[:, :1]


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, in place."""
    return x.tanh_()


def read_label_names(keys: ConfigKeys) -> tuple[str, ...]:
    """The names of the labels, in order: from ``id2label``, or as many numbers as ``num_labels`` says.

    Raises ``CheckpointError`` naming a key.
    """
    given = keys.get("id2label")
    count = keys.size("num_labels", len(given) if isinstance(given, dict) and given else 2)
    if count > MOST_LABELS:
        raise wrong("num_labels", count, f"at most {MOST_LABELS}")
    named = {str(key): str(name) for key, name in given.items()} if isinstance(given, dict) else {}
    return tuple(named.get(str(i), f"LABEL_{i}") for i in range(count))


def read_activation(keys: ConfigKeys, num_labels: int) -> LabelActivation:
    """How scores follow from logits: what sentence-transformers has stored; else a sigmoid for one label, and for
    several a softmax, or a sigmoid each if several may hold."""
    newer = keys.child("sentence_transformers")
    name = newer.get("activation_fn") if newer is not None else keys.get("sbert_ce_default_activation_function")
    several: LabelActivation = "sigmoid" if keys.get("problem_type") == "multi_label_classification" else "softmax"
    known: dict[str, LabelActivation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
    if name is None:
        return "sigmoid" if num_labels == 1 else several
    kind = str(name).rpartition(".")[2]
    if kind not in known:
        raise wrong("sentence_transformers.activation_fn", name, f"one of {', '.join(known)}")
    return known[kind]
