"""Tiny encoders of every architecture, made by transformers, with a tokenizer of words."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel

VOCAB_SIZE = 97
MAX_LEN = 120
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
BERT = {"max_position_embeddings": MAX_LEN}
ROBERTA = {"max_position_embeddings": MAX_LEN + 2, "type_vocab_size": 1, "pad_token_id": 1}
JUDGE = {"num_labels": 1}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert/plain": ("BertModel", BERT),
    "bert/tanh_gelu_one_head": ("BertModel", {**BERT, "hidden_act": "gelu_new", "num_attention_heads": 1}),
    "bert/masked": ("BertForMaskedLM", BERT),
    "bert/judge": ("BertForSequenceClassification", {**BERT, **JUDGE}),
    "bert/judge_of_logits": (
        "BertForSequenceClassification",
        {**BERT, **JUDGE, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ),
    "roberta/plain": ("RobertaModel", ROBERTA),
    "roberta/far_padding": ("RobertaModel", {**ROBERTA, "pad_token_id": 5, "max_position_embeddings": MAX_LEN + 6}),
    "roberta/masked": ("RobertaForMaskedLM", ROBERTA),
    "roberta/judge": ("RobertaForSequenceClassification", {**ROBERTA, **JUDGE}),
    "xlm_roberta/plain": ("XLMRobertaModel", ROBERTA),
    "xlm_roberta/judge": ("XLMRobertaForSequenceClassification", {**ROBERTA, **JUDGE}),
}
WORDS = ("a", "bird", "sings", "in", "the", "old", "tree", "##s", "and", "nobody", "hears", "it")


def make_encoder(folder: Path, row: str) -> PreTrainedModel:
    """Write the row's model, of random float32 weights, and a tokenizer to the folder; return the model."""
    torch.manual_seed(zlib.crc32(row.encode()))
    name, values = ROWS[row]
    model_class = getattr(transformers, name)
    model: PreTrainedModel = model_class(model_class.config_class(**{**SHAPE, **values}, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if name.endswith(("bias", "LayerNorm.weight"))):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.eval().save_pretrained(folder)
    word_tokenizer(has_types=values.get("type_vocab_size") != 1).save(str(folder / "tokenizer.json"))
    return model


def word_tokenizer(has_types: bool) -> tokenizers.Tokenizer:
    """WordPiece over a few words, with [CLS] and [SEP] around and between texts."""
    vocabulary = {text: i for i, text in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    second = "1" if has_types else "0"
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", f"[CLS] $A [SEP] $B:{second} [SEP]:{second}", [("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def write_pooling(folder: Path, mode: str, normalizes: bool) -> None:
    """The files in which sentence-transformers says how a text's vector is made."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, mode: True}))
