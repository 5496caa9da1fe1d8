"""Tiny encoders of every architecture, made by transformers, with a tokenizer of words."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
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
SMALL_DISTIL = {"vocab_size": VOCAB_SIZE, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
DISTIL = {**SMALL_DISTIL, "max_position_embeddings": MAX_LEN, "initializer_range": 0.2}
ROTARY = {"max_position_embeddings": MAX_LEN, "pad_token_id": 0}
SMALL_T5 = {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 = {**SMALL_T5, "n_positions": MAX_LEN, "relative_attention_num_buckets": 12, "relative_attention_max_distance": 40}
DEBERTA = {
    "max_position_embeddings": MAX_LEN,
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
GEMMA = {
    "max_position_embeddings": MAX_LEN,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 12,
    "query_pre_attn_scalar": 9,
    "use_bidirectional_attention": True,
}
MODERN = {**ROTARY, "layer_types": ["full_attention", "sliding_attention"], "local_attention": 14}
EURO = {**ROTARY, "num_key_value_heads": 2}
JUDGE = {"num_labels": 1}
SORTER = {"num_labels": 3, "id2label": {"0": "no", "1": "maybe", "2": "yes"}}
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
SHAPES: dict[str, dict[str, Any]] = {
    "Bert": BERT,
    "Camembert": ROBERTA,
    "DebertaV2": DEBERTA,
    "DistilBert": DISTIL,
    "Electra": {**BERT, "embedding_size": 20},
    "EuroBert": EURO,
    "Gte": ROTARY,
    "MPNet": {"max_position_embeddings": MAX_LEN + 2},
    "ModernBert": MODERN,
    "NomicBert": ROTARY,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
}
"""A shape of each family that has all of ``encoders.CLASSES``."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert/tanh_gelu_one_head": ("BertModel", {**BERT, "hidden_act": "gelu_new", "num_attention_heads": 1}),
    "bert/relu": ("BertModel", {**BERT, "hidden_act": "relu"}),
    "bert/silu": ("BertModel", {**BERT, "hidden_act": "silu"}),
    "bert/judge": ("BertForSequenceClassification", {**BERT, **JUDGE}),
    "bert/judge_of_logits": ("BertForSequenceClassification", {**BERT, **JUDGE, **IDENTITY}),
    "bert/several_may_hold": (
        "BertForSequenceClassification",
        {**BERT, **SORTER, "problem_type": "multi_label_classification"},
    ),
    "roberta/far_padding": ("RobertaModel", {**ROBERTA, "pad_token_id": 5, "max_position_embeddings": MAX_LEN + 6}),
    "roberta/judge": ("RobertaForSequenceClassification", {**ROBERTA, **JUDGE}),
    "xlm_roberta/judge": ("XLMRobertaForSequenceClassification", {**ROBERTA, **JUDGE}),
    "electra/as_wide": ("ElectraModel", {**BERT, "embedding_size": 32}),
    "electra/pretraining": ("ElectraForPreTraining", {**BERT, "embedding_size": 20}),
    "deberta/own_projections": ("DebertaV2Model", {**DEBERTA, "share_att_key": False, "pos_att_type": ["c2p"]}),
    "deberta/one_way_and_positions": (
        "DebertaV2Model",
        {**DEBERTA, "pos_att_type": "p2c", "position_biased_input": True, "type_vocab_size": 2},
    ),
    "deberta/every_distance": (
        "DebertaV2Model",
        {**DEBERTA, "position_buckets": -1, "max_relative_positions": 30, "norm_rel_ebd": "none"},
    ),
    "modernbert/mean_head": (
        "ModernBertForSequenceClassification",
        {**MODERN, **SORTER, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "modernbert/biases": (
        "ModernBertModel",
        {**MODERN, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 2},
    ),
    "eurobert/first": ("EuroBertForSequenceClassification", {**EURO, **SORTER, "classifier_pooling": "bos"}),
    "eurobert/mean": ("EuroBertForSequenceClassification", {**EURO, **SORTER, "classifier_pooling": "mean"}),
    "t5/relu": ("T5EncoderModel", T5),
    "t5/gated": ("T5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu"}),
    "t5/usual_buckets": (
        "T5EncoderModel",
        {**T5, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    ),
    "gemma/bidirectional": ("Gemma3TextModel", GEMMA),
    "gemma/other_window": ("Gemma3TextModel", {**GEMMA, "sliding_window": 7, "head_dim": 8}),
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{family}/{name}": (family + name, shape) for family, shape in SHAPES.items() for name in ("Model",)},
    **VARIANTS,
    **{
        f"{family}/For{kind}Classification": (f"{family}For{kind}Classification", {**shape, **SORTER})
        for kind in ("Sequence", "Token")
        for family, shape in SHAPES.items()
    },
    **{f"{family}/ForMaskedLM": (f"{family}ForMaskedLM", shape) for family, shape in SHAPES.items()},
}
OWN_SHAPE = ("DistilBert", "T5Encoder")
"""Beginnings of classes whose configurations have other names for sizes."""
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "9_Normalize"}
WORDS = ("a", "bird", "sings", "in", "the", "old", "tree", "##s", "and", "nobody", "hears", "it")


def make_encoder(folder: Path, row: str) -> PreTrainedModel:
    """Write the row's model, of random float32 weights, and a tokenizer to the folder; return the model."""
    torch.manual_seed(zlib.crc32(row.encode()))
    name, values = ROWS[row]
    model_class = getattr(transformers, name)
    shape = values if name.startswith(OWN_SHAPE) else {**SHAPE, **values}
    model: PreTrainedModel = model_class(model_class.config_class(**shape, attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "attention_bias" in name:
                parameter.copy_(torch.randn_like(parameter))
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


def write_dense(folder: Path, sizes: list[tuple[int, int]], *, is_pooled: bool) -> list[torch.nn.Linear]:
    """Linear maps of these sizes in folders of their own, behind a pooling or without one; tanh between them."""
    kinds = [("Transformer", ""), *([("Pooling", "1_Pooling")] if is_pooled else [])]
    maps = []
    for place, (num_inputs, num_outputs) in enumerate(sizes):
        name, is_last = f"{len(kinds)}_Dense", place == len(sizes) - 1
        linear = torch.nn.Linear(num_inputs, num_outputs, bias=not is_last)
        kinds.append(("Dense", name))
        (folder / name).mkdir()
        function = "linear.Identity" if is_last else "activation.Tanh"
        values = {"in_features": num_inputs, "out_features": num_outputs, "bias": not is_last}
        values |= {"activation_function": f"torch.nn.modules.{function}"}
        (folder / name / "config.json").write_text(json.dumps(values))
        save_file(
            {f"linear.{key}": value for key, value in linear.state_dict().items()}, folder / name / "model.safetensors"
        )
        maps.append(linear)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps([*modules, *([NORMALIZE] if is_pooled else [])]))
    if is_pooled:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    return maps
