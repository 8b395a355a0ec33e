"""Writes what is generated, from the one place that knows it: `python -m docs.generate --write`, or `--check` to compare.

- docs/operations.md, between its markers: the table of settings from `service.settings`, that of metrics from `service.metrics`.
- docs/openapi.json: what the application says of itself.
- k8s/overlays/prometheus-operator/prometheusrule.yaml: monitoring/alerts.yml in the operator's wrapping.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from service.app import create_app
from service.metrics import Metrics
from service.settings import Settings

ROOT = Path(__file__).parent.parent
RULE = """\
# Written from monitoring/alerts.yml by `make docs`; change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: attend
  labels: {release: prometheus} # what the operator's ruleSelector looks for
spec:
"""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(list(head)), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def settings_table() -> str:
    """Flag, environment variable, default and meaning of every setting."""

    def shown(default: object) -> str:
        if default in (None, "", []):
            return "–"
        return f"`{','.join(default) if isinstance(default, list) else str(default).lower() if isinstance(default, bool) else default}`"

    return table(
        ["flag", "environment", "default", "meaning"],
        [
            [f"`--{name.replace('_', '-')}`", f"`ATTEND_{name.upper()}`", shown(field.default), field.description or ""]
            for name, field in Settings.model_fields.items()
        ],
    )


def metrics_table() -> str:
    """Name, type, labels and meaning of every metric: attend's own, then those of the process and of Python."""
    metrics = Metrics()
    labels = {m._name: m._labelnames for m in vars(metrics).values() if isinstance(m, MetricWrapperBase)}
    families = sorted(metrics.registry.collect(), key=lambda family: (not family.name.startswith("attend_"), family.name))

    def row(family: Metric) -> list[str]:
        own = labels.get(family.name) or sorted({key for sample in family.samples for key in sample.labels})
        name = family.name + "_total" * (family.type == "counter")
        return [f"`{name}`", family.type, ", ".join(f"`{label}`" for label in own) or "–", family.documentation.rstrip(".")]

    return table(["metric", "type", "labels", "meaning"], map(row, families))


def openapi() -> str:
    """The OpenAPI document; its version is the project's, installed or not."""
    document = create_app(Settings.model_construct()).openapi()
    document["info"]["version"] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def rule() -> str:
    """The alerts as a PrometheusRule."""
    groups = (ROOT / "monitoring/alerts.yml").read_text().partition("groups:")[2]
    return RULE + indent("groups:" + groups, "  ")


def between(text: str, name: str, content: str) -> str:
    """The text with new content between its markers. Raises ValueError when it does not have them exactly once."""
    text, count = re.subn(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"<!-- {name} --> … <!-- /{name} --> is there {count} times, not once")
    return text


def generated() -> dict[Path, str]:
    """Every generated file and what it must contain."""
    operations = ROOT / "docs/operations.md"
    text = between(operations.read_text(), "settings", settings_table())
    return {
        operations: between(text, "metrics", metrics_table()),
        ROOT / "docs/openapi.json": openapi(),
        ROOT / "k8s/overlays/prometheus-operator/prometheusrule.yaml": rule(),
    }


def stale() -> list[str]:
    """The generated files that are not what the code says."""
    return [str(path.relative_to(ROOT)) for path, text in generated().items() if not path.exists() or path.read_text() != text]


def main() -> None:
    """Write, or check and exit with 1 when something is stale."""
    parser = argparse.ArgumentParser(prog="docs.generate", description="The generated parts of the documentation.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write them")
    action.add_argument("--check", action="store_true", help="name those that are stale")
    if parser.parse_args().write:
        for path, text in generated().items():
            path.write_text(text)
    elif names := stale():
        sys.exit(f"stale: {', '.join(names)}; run `make docs`")


if __name__ == "__main__":
    main()
