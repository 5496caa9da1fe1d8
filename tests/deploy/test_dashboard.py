"""The dashboard: each of its queries gives data while a server is under load.

With a Prometheus binary (``prometheus`` on the path, or ``OCTAVO_PROMETHEUS``) the queries are evaluated by it; without
one, the names of the metrics in them are looked up in ``/metrics``.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/octavo.json").read_text())
PROMETHEUS = os.environ.get("OCTAVO_PROMETHEUS") or shutil.which("prometheus")
SCRAPE_SECONDS = 0.5
RATE_SECONDS = 4

pytestmark = pytest.mark.slow


def queries() -> list[str]:
    """All queries, with Grafana's variables filled in."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [expr.replace("$__rate_interval", f"{RATE_SECONDS}s").replace("$model", ".*") for expr in found]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, f"exit status {process.returncode}"
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    pytest.fail(f"no answer from {url}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server under load: answers of many lengths, and more requests at times than its queue holds."""
    folder = tmp_path_factory.mktemp("tiny-model")
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.deploy.oracle_server", str(folder), str(port)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    is_over = threading.Event()

    def load(number: int) -> None:
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            while not is_over.is_set():
                prompt = [3 + number] * (20 + number)
                client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8 + number})

    try:
        wait_for(f"{url}/ready", process)
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            for number in range(20):
                pool.submit(load, number)
            yield url
            is_over.set()
    finally:
        is_over.set()
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def prometheus(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if PROMETHEUS is None:
        pytest.skip("no Prometheus binary")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = f"{int(1000 * SCRAPE_SECONDS)}ms"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        wait_for(f"http://{address}/-/ready", process)
        url = f"http://{address}"
        enough = f"count_over_time(http_requests_total[{RATE_SECONDS}s]) >= {RATE_SECONDS / SCRAPE_SECONDS / 2}"
        for _ in range(600):
            if results(url, enough):
                break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def results(prometheus: str, query: str) -> list[float]:
    """The values of an instant query."""
    answer: dict[str, Any] = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, trust_env=False).json()
    assert answer["status"] == "success", answer
    return [float(each["value"][1]) for each in answer["data"]["result"]]


@pytest.mark.parametrize("query", queries())
def test_every_query_gives_data(prometheus: str, query: str) -> None:
    values = results(prometheus, query)
    assert values
    assert not any(value != value for value in values), "NaN: there was nothing to divide by"


def test_every_metric_in_a_query_is_exported(server: str) -> None:
    time.sleep(1)
    exported = set(
        re.findall(r"^([a-zA-Z_:][\w:]*)", httpx.get(f"{server}/metrics", trust_env=False).text, re.MULTILINE)
    )
    for query in queries():
        names = re.findall(r"(?:vllm:|octavo_|http_)\w+", query)
        assert names
        assert set(names) <= exported, query


def test_grafana_finds_the_dashboard_and_its_source() -> None:
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/octavo.yaml").read_text())
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    folder = provider["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/octavo.json"
    sources = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel}
    assert sources == {source["datasources"][0]["uid"]}
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    for volume in grafana["volumes"] + compose["services"]["prometheus"]["volumes"]:
        if volume.startswith("./"):
            assert (ROOT / "deploy" / volume.partition(":")[0]).exists()
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
