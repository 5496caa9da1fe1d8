"""The language model of a vision-language checkpoint: its part of the configuration and of the weights.

Text-only requests need nothing else; the vision parts are not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.models.config import architecture
from octavo.models.keys import ConfigKeys, wrong
from octavo.quant.tensors import Renamed, Source

TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
}
"""Architecture of the checkpoint to that of its text part, and defaults that published configurations omit."""
PREFIXES = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
"""Prefixes of the text part's weights, and the corresponding prefixes in a text-only checkpoint."""
LEFT_OUT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
HEADLESS = re.compile(r"(embed_tokens|layers|norm)\.")
"""Beginnings of names in a checkpoint of a model without a head; elsewhere ``model.`` precedes them."""


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text part; for a text-only model, the configuration itself.

    Either part of a ``config.json`` may have the ``quantization_config``. Raises ``CheckpointError``.
    """
    whole = architecture(ConfigKeys(values))
    if whole not in TEXT_PARTS:
        return values
    name, defaults = TEXT_PARTS[whole]
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        raise wrong("text_config", inner, "an object")
    outer = {
        key: values[key] for key in ("eos_token_id", "quantization_config", "tie_word_embeddings") if key in values
    }
    given = {key: value for key, value in {**outer, **inner}.items() if value is not None}
    return {**defaults, **given, "architectures": [name]}


class TextPart(Renamed):
    """The weights of the text part under the names of a text-only model; unchanged for most text-only models.

    Some have the names of a model without a head, which lack the prefix ``model.``; here they have it.
    """

    def __init__(self, source: Source) -> None:
        stored = {_own_name(name): name for name in source.names() if not name.startswith(LEFT_OUT)}
        self._is_renamed = any(own != name for own, name in stored.items())
        self._is_headless = any(map(HEADLESS.match, stored)) and not any(own.startswith("model.") for own in stored)
        if self._is_headless:
            stored = {f"model.{own}" if HEADLESS.match(own) else own: name for own, name in stored.items()}
        super().__init__(source, stored)

    def aliases(self, module: str) -> tuple[str, ...]:
        """Other names of a module: those of checkpoints like this one, none for most text-only models.

        All prefixes are tried, as a configuration may have the names of the model that was quantised, which differ from
        those that the library stores.
        """
        if self._is_headless:
            return (module.removeprefix("model."),)
        if not self._is_renamed:
            return ()
        stored = ((prefix, own) for prefix, own in PREFIXES.items() if f"{module}.".startswith(own))
        return tuple((prefix + f"{module}.".removeprefix(own)).removesuffix(".") for prefix, own in stored)


def _own_name(name: str) -> str:
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
