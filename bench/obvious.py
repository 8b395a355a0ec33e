"""The service that everybody writes first: FastAPI, transformers with eager attention, `tolist()`. What the benchmark compares with.

Run as `python -m bench.obvious FOLDER PORT`.
"""

import sys

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer


class Text(BaseModel):
    """The request."""

    text: str


def create_app(folder: str) -> FastAPI:
    """One route that returns vectors and attention of one text."""
    app = FastAPI()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    @app.get("/readyz")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    def answer(request: Text) -> dict[str, object]:
        inputs = tokenizer(request.text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            output = model(**inputs, output_attentions=True)
        return {
            "tokens": tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]),
            "embeddings": output.last_hidden_state[0].tolist(),
            "attentions": [layer[0].tolist() for layer in output.attentions],
        }

    @app.post("/attend")
    def attend(request: Text):  # as tutorials write it: FastAPI walks through the answer
        return answer(request)

    @app.post("/typed")
    def typed(request: Text) -> dict[str, object]:  # with a type, which lets pydantic write it
        return answer(request)

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
