"""RoBERTa (arXiv 1907.11692) and XLM-RoBERTa: BERT with positions that start after the padding token's id."""

from __future__ import annotations

from octavo.layers.linear import Linear
from octavo.models.bert import BertModel, EncoderConfig, read_bert
from octavo.models.keys import ConfigKeys
from octavo.models.loader import WeightLoader


class RobertaModel(BertModel):
    """``BertModel`` documents the methods."""

    root = "roberta."

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        return read_bert(keys, first_position=keys.size("pad_token_id", 1, low=0) + 1)

    def read_head(self, weights: WeightLoader) -> tuple[Linear, Linear]:
        D = self.config.hidden_size
        weights.tensors.leave_out(f"{self.root}pooler.")  # some have it, though the head does not use it
        dense = weights.replicated("classifier.dense", D, D, True)
        return dense, weights.replicated("classifier.out_proj", 1, D, True)
