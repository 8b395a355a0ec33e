"""Every example in the documentation runs, as it is written, against a real server."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import ROOT

PAGES = [ROOT / "README.md", ROOT / "docs/reading.md"]
EXAMPLES = [
    pytest.param(language, code, id=f"{page.name}-{number}-{language}")
    for page in PAGES
    for number, (language, code) in enumerate(re.findall(r"^```(python|sh|js)\n(.*?)^```$", page.read_text(), re.M | re.S))
]
COMMANDS = {"python": [sys.executable], "sh": ["bash", "-euo", "pipefail"], "js": ["node", "--input-type=module"]}
NEEDS = {"python": [], "sh": ["curl", "jq"], "js": ["node"]}


def run(language: str, code: str, url: str) -> str:
    for program in NEEDS[language]:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    code = code.replace("http://127.0.0.1:8000", url)
    done = subprocess.run(COMMANDS[language], input=code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_example(server, language, code):
    if "openai" in code:
        pytest.importorskip("openai")
    if "assert" not in code and "throw" not in code:
        assert run(language, code, server.url).strip()
    else:
        run(language, code, server.url)


def test_the_answer_in_the_readme(server):
    code, answer = re.search(r"^```sh\n(.*?)^```\n```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S).groups()
    assert run("sh", code, server.url) == answer


def test_the_vectors_in_the_readme(server):
    """This bank is nearer to a river than to money, the other way round for the other one, by the figures that are given."""
    import numpy as np

    def vector(text: str, word: str) -> np.ndarray:
        return np.array(server.attend(text, focus=word, include=["embeddings"], decimals=9)["results"][0]["embeddings"][0])

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return round(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), 2)

    fishing = vector("Tom is going to fish at the river bank", "bank")
    paying = vector("Tom is going to deposit money at the bank", "bank")
    river, money = vector("The river is wide", "river"), vector("He has no money", "money")
    figures = [cosine(fishing, river), cosine(fishing, money), cosine(paying, money), cosine(paying, river)]
    assert figures == [0.43, 0.28, 0.35, 0.26]
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"0\.\d\d(?=\))", readme.split("To *river*")[1].split("## Start")[0])[:4] == [f"{f:.2f}" for f in figures]


@pytest.mark.parametrize(
    "page", [p.relative_to(ROOT) for p in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]], ids=str
)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)[)#]", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target
