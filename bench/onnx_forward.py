"""ONNX Runtime's bare forward, padded: run by the benchmark in the peers' environment as
`python -m bench.onnx_forward FOLDER THREADS`.

Each line of standard input is `{"what": NAME, ...}`, the answer one line of JSON.
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


class Peer:
    """The model in ONNX Runtime, with so many threads."""

    def __init__(self, folder: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "model.onnx"
            export(folder, path)
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(256)

    def batches(self, texts: list[str], size: int) -> list[dict[str, np.ndarray]]:
        """The texts as they come, `size` a batch, padded to the longest of it."""
        made = []
        for first in range(0, len(texts), size):
            encodings = self.tokenizer.encode_batch(texts[first : first + size])
            ids, mask = np.zeros((2, len(encodings), max(len(e.ids) for e in encodings)), np.int64)
            for row, encoding in enumerate(encodings):
                ids[row, : len(encoding.ids)], mask[row, : len(encoding.ids)] = encoding.ids, 1
            made.append(dict(zip(NAMES, (ids, mask, np.zeros_like(ids)), strict=True)))
        return made

    def forward(self, texts: list[str], alone: bool) -> list[float]:
        """Seconds of each batch."""
        taken = []
        for batch in self.batches(texts, 1 if alone else 32):
            start = time.perf_counter()
            self.session.run(None, batch)
            taken.append(time.perf_counter() - start)
        return taken

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """The mean of each text's last hidden states, scaled to length 1."""
        (batch,) = self.batches(texts, len(texts))
        mask = batch["attention_mask"][:, :, None]  # [B, N, 1]
        pooled = (self.session.run(None, batch)[0] * mask).sum(1) / mask.sum(1)  # [B, d_model]
        return (pooled / np.linalg.norm(pooled, axis=1, keepdims=True)).tolist()


def main(folder: str, threads: str) -> None:
    """Export, then answer one line after another."""
    peer = Peer(folder, int(threads))
    print('"ready"', flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(peer, asked.pop("what"))(**asked)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
