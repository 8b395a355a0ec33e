"""ONNX Runtime's bare forward, padded: run by the benchmark in the peers' environment as `python -m bench.onnx_forward FOLDER`.

Each line of standard input is a JSON array of texts; the answer is the seconds that they took in batches of 32, as they come.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

NAMES = ("input_ids", "attention_mask", "token_type_ids")


class Inner(torch.nn.Module):
    """The model as a function of three tensors."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(folder, attn_implementation="eager")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        """→ the last hidden state [B, N, d_model]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state


def export(folder: str, path: Path) -> None:
    """Write the model as ONNX, with any number of texts of any length."""
    ids = torch.ones(2, 8, dtype=torch.long)
    axes = {name: {0: "texts", 1: "tokens"} for name in (*NAMES, "hidden")}
    torch.onnx.export(
        Inner(folder).eval(), (ids, ids, ids * 0), str(path), input_names=list(NAMES), output_names=["hidden"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip


def main(folder: str) -> None:
    """Export, then answer one line after another."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.onnx"
        export(folder, path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    print("ready", flush=True)
    for line in sys.stdin:
        batches = []
        texts = json.loads(line)
        for first in range(0, len(texts), 32):
            encodings = tokenizer.encode_batch(texts[first : first + 32])
            longest = max(len(e.ids) for e in encodings)
            ids, mask = np.zeros((2, len(encodings), longest), np.int64)
            for row, encoding in enumerate(encodings):
                ids[row, : len(encoding.ids)], mask[row, : len(encoding.ids)] = encoding.ids, 1
            batches.append(dict(zip(NAMES, (ids, mask, np.zeros_like(ids)), strict=True)))
        start = time.perf_counter()
        for batch in batches:
            session.run(None, batch)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
