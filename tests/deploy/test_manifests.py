"""Manifests, chart and workflow: against Kubernetes' schemas where ``kubernetes-validate`` is installed, rendered by
Helm where ``helm`` is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from octavo.config import ServeConfig, settings
from octavo_fleet.ray.settings import FleetSettings, parse

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/octavo"
KUBERNETES = "1.30"
DEFAULTS = [(name, getattr(FleetSettings(), name)) for name in FleetSettings.__struct_fields__]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def check_pod(spec: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, KUBERNETES, strict=True)


def test_the_ray_service_has_arguments_that_build_app_takes() -> None:
    spec = load(DEPLOY / "kuberay/rayservice.yaml")["spec"]
    application = yaml.safe_load(spec["serveConfigV2"])["applications"][0]
    assert application["import_path"] == "octavo.ray:build_app"
    fleet, _ = parse(application["args"])
    workers = spec["rayClusterConfig"]["workerGroupSpecs"][0]
    assert workers["maxReplicas"] >= fleet.max_replicas
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) % fleet.gpus_per_replica == 0
    assert int(limits["cpu"]) >= fleet.cpus_per_replica


def test_the_pods_of_the_ray_service_are_valid() -> None:
    cluster = load(DEPLOY / "kuberay/rayservice.yaml")["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        check_pod(group["template"]["spec"])


def test_the_charts_values_match_their_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = load(CHART / "values.yaml")
    jsonschema.validate(values, schema)
    assert set(schema["properties"]) - {"global"} == set(values)
    for bad in ({"modle": "x"}, {"replicas": "2"}, {"keda": {"waitng": 5}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**values, **bad}, schema)


def test_the_chart_uses_values_that_exist() -> None:
    values = load(CHART / "values.yaml")
    for path in (CHART / "templates").iterdir():
        for name in re.findall(r"\.Values((?:\.\w+)+)", path.read_text()):
            found = values
            for part in name[1:].split("."):
                assert part in found, f"{path.name}: {name}"
                found = found[part]


def test_environment_variables_of_the_chart_and_the_image_are_flags() -> None:
    flags = {f"OCTAVO_{setting.name.upper()}" for setting in settings(ServeConfig)}
    for path in (CHART / "templates/deployment.yaml", DEPLOY / "Dockerfile"):
        for name in re.findall(r"(OCTAVO_[A-Z_]+)[=\n]", path.read_text()):
            assert name in flags


@pytest.mark.parametrize("chosen", [[], ["gpus=1", "cache.size=10Gi"], ["keda.enabled=true"], ["hpa.enabled=true"]])
def test_helm_renders_valid_objects(chosen: list[str]) -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("no helm")
    subprocess.run([helm, "lint", "--strict", CHART], check=True)
    flags = [word for each in chosen for word in ("--set", each)]
    rendered = subprocess.run(
        [helm, "template", "llm", CHART, *flags], check=True, capture_output=True, text=True
    ).stdout
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in yaml.safe_load_all(rendered):
        if document["kind"] not in ("ScaledObject", "ServiceMonitor"):
            validate(document, KUBERNETES, strict=True)


def test_the_dockerfile_copies_what_the_context_has() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == kept
    assert all((ROOT / name).exists() for name in names)


def test_the_workflow_runs_what_must_pass() -> None:
    steps = load(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["steps"]
    assert ".ci/run" in [step.get("run") for step in steps]


def test_compose_files_agree() -> None:
    plain, cuda = load(DEPLOY / "compose.yaml"), load(DEPLOY / "compose.cuda.yaml")
    assert set(cuda["services"]) <= set(plain["services"])
    assert plain["services"]["octavo"]["build"]["dockerfile"] == "deploy/Dockerfile"
    stages = re.findall(r"^FROM \S+ AS (\w+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for compose in (plain, cuda):
        assert compose["services"]["octavo"]["build"]["target"] in stages
    targets = load(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["octavo:8000"]


def test_the_page_lists_the_arguments_of_a_fleet() -> None:
    text = (ROOT / "docs/deployment.md").read_text()
    table = text[text.index("| argument | default |") : text.index("All other arguments")]
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", table, re.MULTILINE)
    pairs = [zip(names.split(", "), values.split(", "), strict=True) for names, values in rows]
    listed = {name: value for row in pairs for name, value in row}
    assert listed == {f"`{name}`": value if isinstance(value, str) else f"{value:g}" for name, value in DEFAULTS}
