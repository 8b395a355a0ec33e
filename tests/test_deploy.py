"""What is deployed: Compose, manifests, dashboard, alerts, checked against the code and with the tools that will read them."""

import itertools
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from docs import generate
from service.app import create_app
from service.settings import Settings
from tests.server import ROOT, Server

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: apt-get install prometheus)")
kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed; it builds the manifests, without a cluster")
VARIABLES = {f"ATTEND_{name.upper()}" for name in Settings.model_fields}
OVERLAYS = ("base", "overlays/cpu-only", "overlays/gpu", "overlays/keda", "overlays/prometheus-operator")
KUBERNETES = ("1.30", "1.36")
CUSTOM = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
PROBES = "/livez|/readyz|/health|/metrics"


def read(path: str) -> Any:
    """A YAML file of the repository."""
    return yaml.safe_load((ROOT / path).read_text())


def tool(*command: str, stdin: str | None = None) -> str:
    """The output of a tool; what it complains of fails the test."""
    done = subprocess.run(command, input=stdin, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ── The image and Compose ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_image_takes_the_same_torch_as_make_and_starts_without_a_shell() -> None:
    dockerfile, makefile = (ROOT / "Dockerfile").read_text(), (ROOT / "Makefile").read_text()
    assert re.findall(r"torch==[\d.]+", dockerfile) == re.findall(r"torch==[\d.]+", makefile)
    assert '\nENTRYPOINT ["attend", "serve"]\n' in dockerfile
    assert "\nUSER 10001:10001\n" in dockerfile
    assert re.search(r"\nHEALTHCHECK .*CMD \[", dockerfile)
    for word in ("PYTHON_VERSION=", "TORCH_INDEX=", "MODEL="):
        assert f"\nARG {word}" in dockerfile


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read("docker-compose.yml")


def test_compose_can_be_read_by_version_1_29_too(compose: dict[str, Any]) -> None:
    assert {key for key in compose if not key.startswith("x-")} == {"services", "volumes"}
    if shutil.which("docker-compose"):
        tool("docker-compose", "-f", "docker-compose.yml", "config", "-q")


@pytest.mark.parametrize("name", ["attend", "attend-gpu", "prometheus", "grafana"])
def test_every_container_is_fenced_in(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert service["cpus"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert all(port.startswith("${PUBLISH_ADDRESS:-127.0.0.1}:") for port in service["ports"])
    assert "privileged" not in service
    for volume in service["volumes"]:
        source = volume.split(":")[0]
        assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], volume


def test_only_the_gpu_service_waits_for_its_profile(compose: dict[str, Any]) -> None:
    assert {name: s["profiles"] for name, s in compose["services"].items() if "profiles" in s} == {"attend-gpu": ["gpu"]}
    devices = compose["services"]["attend-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    ports = [port.split(":-")[2].split("}")[0] for s in compose["services"].values() for port in s["ports"]]
    assert len(set(ports)) == len(ports)


def test_compose_passes_every_setting_on(compose: dict[str, Any]) -> None:
    passed = {line.split("=")[0] for line in compose["services"]["attend"]["environment"]}
    assert {name for name in passed if name.startswith("ATTEND_")} == VARIABLES - {"ATTEND_HOST", "ATTEND_PORT"}
    assert compose["services"]["attend-gpu"]["environment"] == compose["services"]["attend"]["environment"]


def test_compose_waits_longer_than_the_service_drains(compose: dict[str, Any]) -> None:
    assert int(compose["services"]["attend"]["stop_grace_period"].removesuffix("s")) > Settings.model_fields["grace_period"].default


def test_the_example_environment_names_only_what_is_read(compose: dict[str, Any]) -> None:
    named = re.findall(r"^# ([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text())) | {"TORCH_INDEX", "HF_TOKEN"}
    assert set(named) <= VARIABLES | used
    assert used <= set(named)
    assert len(set(named)) == len(named)


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def built(overlay: str) -> dict[str, dict[str, Any]]:
    """What kustomize makes of an overlay, by kind; several of a kind by `kind/name`."""
    manifests = [m for m in yaml.safe_load_all(tool("kubectl", "kustomize", f"k8s/{overlay}")) if m]
    kinds = [m["kind"] for m in manifests]
    return {m["kind"] if kinds.count(m["kind"]) == 1 else f"{m['kind']}/{m['metadata']['name'].split('-')[-1]}": m for m in manifests}


@kubectl
@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_what_kubernetes_takes(overlay: str, version: str) -> None:
    manifests = built(overlay)
    assert {"Namespace", "ServiceAccount", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(manifests)
    for kind, manifest in manifests.items():
        assert kind == "Namespace" or manifest["metadata"]["namespace"] == "attend"
        if kind not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_restricted_pod_security_standard_is_met(overlay: str) -> None:
    manifests = built(overlay)
    assert manifests["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert {next(iter(set(volume) - {"name"})) for volume in pod["volumes"]} == {"emptyDir"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert not any("hostPort" in port for port in container["ports"])


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_watched_and_ended_as_the_service_expects(overlay: str) -> None:
    manifests = built(overlay)
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    routes = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert routes == {"startup": "/health", "liveness": "/livez", "readiness": "/readyz"}
    assert set(routes.values()) <= set(create_app(Settings()).openapi()["paths"])
    drain = float(settings_of(manifests)["ATTEND_GRACE_PERIOD"])
    assert pod["terminationGracePeriodSeconds"] > container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert float(container["resources"]["limits"]["cpu"]).is_integer()
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is manifests["ServiceAccount"]["automountServiceAccountToken"] is False
    assert {c["topologyKey"] for c in pod["topologySpreadConstraints"]} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}


def settings_of(manifests: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The data of the ConfigMap that the Deployment takes its environment from."""
    reference = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"]
    (config,) = (m for m in manifests.values() if m["kind"] == "ConfigMap" and m["metadata"]["name"] == reference)
    return config["data"]


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_config_map_holds_settings_that_the_service_accepts(overlay: str) -> None:
    data = settings_of(built(overlay))
    ours = {name.removeprefix("ATTEND_").lower(): value for name, value in data.items() if name.startswith("ATTEND_")}
    assert Settings(**ours).max_queue_tokens == int(data["ATTEND_MAX_QUEUE_TOKENS"])
    assert set(data) <= VARIABLES | {"HF_HUB_OFFLINE"}


@kubectl
def test_everything_finds_the_pods() -> None:
    manifests = built("overlays/prometheus-operator")
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels == manifests["Service"]["spec"]["selector"]
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == manifests["Service"]["metadata"]["labels"] == labels
    assert manifests["ServiceMonitor"]["spec"]["endpoints"][0]["port"] == manifests["Service"]["spec"]["ports"][0]["name"]
    assert manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == manifests["Deployment"]["metadata"]["name"]


@kubectl
def test_each_overlay_scales_by_what_it_can_read() -> None:
    def metrics(overlay: str) -> list[str]:
        entries = built(overlay)["HorizontalPodAutoscaler"]["spec"]["metrics"]
        return [entry["pods"]["metric"]["name"] if entry["type"] == "Pods" else entry["resource"]["name"] for entry in entries]

    assert metrics("base") == ["attend_queue_tokens", "cpu"]
    assert metrics("overlays/cpu-only") == ["cpu"]
    assert metrics("overlays/gpu") == ["attend_queue_tokens"]
    keda = built("overlays/keda")
    assert "HorizontalPodAutoscaler" not in keda
    assert keda["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == keda["Deployment"]["metadata"]["name"]
    assert [trigger["type"] for trigger in keda["ScaledObject"]["spec"]["triggers"]] == ["prometheus", "prometheus", "cpu"]
    gpu = built("overlays/gpu")["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert gpu["image"] == "attend:0.1.0-gpu"


@kubectl
def test_the_operator_gets_the_same_alerts_and_dashboard() -> None:
    manifests = built("overlays/prometheus-operator")
    assert manifests["PrometheusRule"]["spec"] == read("monitoring/alerts.yml")
    dashboard = manifests["ConfigMap/dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["attend.json"]) == DASHBOARD


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert read("k8s/base/kustomization.yaml")["images"][0]["newTag"] == version
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()


# ── Dashboard and alerts ─────────────────────────────────────────────────────────────────────────────────────────────────────

DASHBOARD = json.loads((ROOT / "monitoring/grafana/dashboards/attend.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in read("monitoring/alerts.yml")["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]


def panel_queries() -> list[str]:
    """The dashboard's queries with its variables filled in."""
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    fill = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
    return [re.sub(r"\$\w+", lambda m: fill[m[0]], query) for query in queries]


def scaler_queries() -> list[str]:
    """What the autoscalers ask for."""
    triggers = read("k8s/overlays/keda/scaledobject.yaml")["spec"]["triggers"]
    hpa = read("k8s/base/horizontalpodautoscaler.yaml")["spec"]["metrics"]
    (rule,) = read("k8s/metrics-adapter.yaml")["rules"]["custom"]
    assert rule["name"]["as"] == hpa[0]["pods"]["metric"]["name"]
    return [t["metadata"]["query"] for t in triggers if t["type"] == "prometheus"] + [rule["seriesQuery"]]


def test_the_dashboard_is_well_formed() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        covered = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not covered & cells, f"{panel['title']} lies over another panel"
        cells |= covered
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "model", "instance"]


def test_the_dashboard_shows_what_operators_need() -> None:
    queries = " ".join(panel_queries())
    for name in (
        "attend_requests_total", 'status=~"5..|424"', "attend_request_duration_seconds_bucket", "attend_stage_duration_seconds_bucket",
        "attend_queue_tokens", "attend_batch_tokens_sum", "attend_tokens_total", "attend_attention_values_total", "by (reason)",
        "attend_model_ready", "process_resident_memory_bytes",
    ):  # fmt: skip
        assert name in queries
    for query in panel_queries():
        for counter in re.finditer(r"\w+_(total|bucket|sum|count)\b", query):
            before = query[: counter.start()]
            assert before.endswith(("rate(", "increase(")), f"{counter[0]} only ever grows: {query}"


def test_grafana_finds_data_source_and_dashboard(compose: dict[str, Any]) -> None:
    (source,) = read("monitoring/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read("monitoring/grafana/provisioning/dashboards/attend.yml")["providers"]
    mounts = {v.split(":")[1]: v.split(":")[0] for v in compose["services"]["grafana"]["volumes"]}
    assert (ROOT / mounts[provider["options"]["path"]] / "attend.json").exists()
    assert (ROOT / mounts["/etc/grafana/provisioning"] / "datasources").is_dir()


@promtool
def test_every_query_can_be_parsed(tmp_path: Path) -> None:
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(panel_queries() + scaler_queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(rules)} rules found" in tool("promtool", "check", "rules", str(file))


@promtool
def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    tool("promtool", "check", "config", "--syntax-only", "monitoring/prometheus.yml")
    assert f"{len(RULES)} rules found" in tool("promtool", "check", "rules", "monitoring/alerts.yml")
    tool("promtool", "test", "rules", "monitoring/alerts_test.yml")


def test_every_alert_is_tested_and_has_its_place_in_the_handbook() -> None:
    cases = [case for test in read("monitoring/alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    handbook = (ROOT / "docs/operations.md").read_text()
    for alert in ALERTS:
        fired = [bool(case.get("exp_alerts")) for case in cases if case["alertname"] == alert["alert"]]
        assert True in fired
        assert False in fired
        assert f"### {alert['alert']}\n" in handbook
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("warning", "critical")
        if "attend_requests_total" in alert["expr"] or "attend_request_duration" in alert["expr"]:
            assert f'route!~"{PROBES}"' in alert["expr"]


def test_every_metric_that_is_asked_for_exists(server: Server) -> None:
    families = list(text_string_to_metric_families(server.client.get("/metrics").text))
    there = {sample.name for family in families for sample in family.samples}
    asked = " ".join([*panel_queries(), *scaler_queries(), *(rule["expr"] for rule in RULES)])
    names = set(re.findall(r"\b(?:attend|process)_\w+", asked))
    assert len(names) > 15
    assert names <= there


@promtool
def test_prometheus_likes_the_metrics(server: Server) -> None:
    tool("promtool", "check", "metrics", stdin=server.client.get("/metrics").text)


# ── What is generated ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_generated_documents_say_what_the_code_says() -> None:
    assert generate.stale() == []
