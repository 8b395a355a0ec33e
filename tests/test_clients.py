"""The examples of docs/clients, run with the projects themselves; slow, because they install them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.checkpoint import DEFAULT_MODEL, locate
from tests.server import ROOT, serving

pytestmark = pytest.mark.slow
PLACE = ROOT / ".bench" / "clients"
PAGES = sorted((ROOT / "docs/clients").glob("*.md"))
PYTHON = [(page.stem, code) for page in PAGES for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)]


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of an environment with the projects in it, made the first time."""
    requirements = ROOT / "tests/requirements-clients.txt"
    made = PLACE / "complete"
    if not made.exists() or made.stat().st_mtime < requirements.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PLACE)], check=True)
        subprocess.run([str(PLACE / "bin/pip"), "install", "-q", "-r", str(requirements)], check=True)
        made.touch()
    return str(PLACE / "bin/python")


@pytest.mark.parametrize(("page", "code"), [pytest.param(page, code, id=f"{page}-{i}") for i, (page, code) in enumerate(PYTHON)])
def test_python(server, python, tmp_path, page, code):
    environment = {
        **os.environ,
        "OPENAI_API_KEY": "none",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [python, "-"], input=code.replace("http://127.0.0.1:8000", server.url), capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_node(server, tmp_path: Path):
    code = re.search(r"^```js\n(.*?)^```$", (ROOT / "docs/clients/openai.md").read_text(), re.M | re.S).group(1)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "openai"], cwd=tmp_path, check=True, timeout=240)
    (tmp_path / "example.mjs").write_text(code.replace("http://127.0.0.1:8000", server.url))
    done = subprocess.run(["node", "example.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def run(python: str, code: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_langchain_by_default_sends_token_ids(server, python):
    """Only its tokenizer's table, which would have to be downloaded, is replaced: ids of the model's own give the vectors of the
    texts, an id that the vocabulary does not have (OpenAI's table has 100,000) is refused by name."""
    code = f"""
import numpy, openai, requests, tiktoken
from langchain_openai import OpenAIEmbeddings
class Encoding:
    name, more = "model", []
    def encode(self, text, **_):
        return [t["id"] for t in requests.post("{server.url}/tokenize", json={{"inputs": text}}).json()[0]] + self.more
    encode_ordinary = encode
    def decode(self, ids): return "x"
tiktoken.encoding_for_model = tiktoken.get_encoding = lambda name: Encoding()
def embed(**options):
    return OpenAIEmbeddings(base_url="{server.url}/v1", api_key="none", model="{DEFAULT_MODEL}", **options).embed_query("The river bank")
assert numpy.allclose(embed(), embed(check_embedding_ctx_length=False), atol=1e-6)
Encoding.more = [99999]
try:
    embed()
    raise SystemExit("an id beyond the vocabulary was taken")
except openai.BadRequestError as error:
    assert "99999" in str(error) and "30521" in str(error), error
"""
    run(python, code)


def test_langchain_with_the_tokenizer_of_transformers(python, tmp_path):
    folder = str(locate(DEFAULT_MODEL)[2])
    with serving(tmp_path / "log", "--alias", f"{folder}={DEFAULT_MODEL}") as server:
        code = f"""
import numpy
from langchain_openai import OpenAIEmbeddings
def embed(text, **options):
    return OpenAIEmbeddings(base_url="{server.url}/v1", api_key="none", model="{folder}", **options).embed_query(text)
short = "The river bank"
assert numpy.allclose(embed(short, tiktoken_enabled=False), embed(short, check_embedding_ctx_length=False), atol=1e-6)
assert len(embed(short * 200, tiktoken_enabled=False, embedding_ctx_length=254)) == 384
"""
        run(python, code)
