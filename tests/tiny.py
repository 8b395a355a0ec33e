"""Tiny randomly initialised models of many architectures, made in the test: no download, the same weights every time."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    *"0123456789.,'-",
]
WIDTH, HEADS, LAYERS = 32, 4, 3
_COMMON = {
    "vocab_size": len(VOCABULARY), "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.12,
}  # fmt: skip
_ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}

ARCHITECTURES: dict[str, dict[str, object]] = {
    "bert": {},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48},
    "electra": {"embedding_size": 24},
    "albert": {"embedding_size": 24},
    "mpnet": {},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 32},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "nomic_bert": {},
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128},
    "gpt_neox": {},
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": None},
    "eurobert": {"num_key_value_heads": 2},
    "t5": {"d_model": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "d_kv": 8, "d_ff": 48},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip


def config(name: str, **changes: object) -> PreTrainedConfig:
    """The configuration of a tiny model of the architecture."""
    return AutoConfig.for_model(name, **{**_COMMON, **ARCHITECTURES[name], **changes})


def model(name: str, **changes: object) -> PreTrainedModel:
    """A tiny model, fp32, as transformers runs it with `output_attentions`."""
    torch.manual_seed(7)
    made = AutoModel.from_config(config(name, **changes), attn_implementation="eager").eval()
    for parameter in made.parameters():  # biases and norms too, which start at 0 and 1: a fault in them must show
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece over single letters, with a special token at both ends."""
    raw = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(VOCABULARY)}, unk_token="<unk>"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", cls_token="<s>", sep_token="</s>"
    )


def save(folder: Path, name: str = "bert", **changes: object) -> Path:
    """A checkpoint on disk, weights as safetensors."""
    model(name, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
