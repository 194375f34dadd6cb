"""The dashboards and alerts, checked with a Prometheus that scrapes a real run and server."""

import itertools
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from serving.addresses import free_port
from tests.k8s.monitoring_files import (
    alerts,
    dashboards,
    expressions,
    groups,
    metric_names,
    needs_kubectl,
    of_kind,
)
from tests.prometheus import needs_prometheus, prometheus
from tests.serving.published import publish
from tests.serving.started import Server, as_json, bundle, end, images, of_each, start
from tests.system.processes import ROOT
from tests.system.runs import launched
from tests.tiny_bundle import write

__all__ = ["bundle", "images"]  # fixtures

pytestmark = [pytest.mark.slow, needs_kubectl, needs_prometheus]
TOKEN = "a-token-of-this-test-0123456789"
TIMEOUT_SECONDS = 240


def free_pair() -> int:
    """Return the first of two consecutive free ports."""
    while True:
        port = free_port("127.0.0.1", 0)
        try:
            socket.create_server(("127.0.0.1", port + 1)).close()
        except OSError:
            continue
        return port


@contextmanager
def training(shards: Path, folder: Path, port: int) -> Iterator[None]:
    """Train the shipped recipe on two ranks, with only a few characters and no step limit."""
    settings = {
        "data.shards": shards,
        "data.workers": 1,
        "train.duration": "{steps: 100000}",
        "train.global_batch": 12,
        "checkpoint.every": "{steps: 20}",
        "evaluation.every": "{steps: 20}",
        "telemetry.log_every": 1,
        "telemetry.port": port,
        "telemetry.peak_tflops": 1,
    }
    options = [f"{key}={value}" for key, value in settings.items()]
    recipe = ROOT / "launch/recipes/glyphs.yaml"
    with launched(recipe, folder / "run", *options, num=2) as run:
        yield
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(timeout=60) == 75, run.log.read_text()


def scrapes(training_port: int, agent: str, rules: Path) -> str:
    """Return a Prometheus config that applies the PodMonitors' settings to local addresses."""
    ranks = [f"127.0.0.1:{training_port + rank}" for rank in (0, 1)]
    (spec,) = (
        each["spec"] for each in of_kind("PodMonitor") if each["metadata"]["name"] == "kway-serving"
    )
    (component,) = spec["podTargetLabels"]
    (endpoint,) = spec["podMetricsEndpoints"]
    tree = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "run",
                "static_configs": [{"targets": ranks, "labels": {"namespace": "ml"}}],
            },
            {
                "job_name": "web",
                "static_configs": [
                    {
                        "targets": [agent],
                        "labels": {"namespace": "ml", re.sub(r"\W", "_", component): "serving"},
                    }
                ],
                "metric_relabel_configs": [
                    {snake_case(key): value for key, value in relabeling.items()}
                    for relabeling in endpoint["metricRelabelings"]
                ],
            },
        ],
    }
    return yaml.safe_dump(tree)


def snake_case(key: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key)


def agent_of(server: Server) -> str:
    """Return the metrics address of Ray's agent, which is a pod's `metrics` port in a cluster."""
    ports = of_each(
        server,
        lambda process: [
            listening.laddr.port
            for listening in process.net_connections()
            if "DashboardAgent" in process.name() and listening.status == psutil.CONN_LISTEN
        ],
    )
    for port in itertools.chain.from_iterable(ports):
        with suppress(httpx.HTTPError):
            if "ray_" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text:
                return f"127.0.0.1:{port}"
    pytest.fail("no agent exports metrics")


def series(api: httpx.Client, expression: str) -> list[dict]:
    answer = api.get("query", params={"query": expression}).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def empty_panels(api: httpx.Client) -> set[str]:
    return {
        f"{board['title']}: {panel}"
        for board in dashboards().values()
        for panel, found in expressions(board).items()
        if not any(series(api, expression) for expression in found)
    }


@pytest.fixture(scope="module")
def api(
    glyphs: Path, bundle: Path, images: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A Prometheus that has the alerts and data for every panel."""
    folder = tmp_path_factory.mktemp("monitored")
    credentials, rules, port = folder / "tokens", folder / "rules.yaml", free_pair()
    credentials.write_text(TOKEN)
    credentials.chmod(0o600)
    each_second = [{**group, "interval": "1s"} for group in groups()]
    rules.write_text(yaml.safe_dump({"groups": each_second}))
    with ExitStack() as opened:
        path = folder / "pets"
        path.symlink_to(bundle)
        server = start(path, folder / "stderr", "--token-file", credentials, "--replicas", 1)
        opened.callback(end, server)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        client = opened.enter_context(
            httpx.Client(base_url=server.url, timeout=30, headers=headers)
        )
        opened.enter_context(training(glyphs, folder, port))
        config = scrapes(port, agent_of(server), rules)
        prom = opened.enter_context(prometheus(folder, config))
        publish(write(folder / "next", bias=False), path)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while empty := empty_panels(prom):
            assert time.monotonic() < deadline, empty
            body = as_json(images[:2], classes=["husky"])
            assert client.post("/v1/query", json=body).status_code == 200
            assert client.get("/v1/nothing").status_code == 404
            time.sleep(0.5)
        yield prom


def test_every_panel_shows_data_from_a_real_run_and_server(api: httpx.Client) -> None:
    found = {panel for board in dashboards().values() for panel in expressions(board)}
    assert len(found) > 25


def test_panels_show_the_values_of_the_run_and_the_server(api: httpx.Client) -> None:
    def value(expression: str) -> float:
        (result,) = series(api, expression)
        return float(result["value"][1])

    boards = dashboards()
    of_training = expressions(boards["kway-training.json"])
    of_serving = expressions(boards["kway-serving.json"])

    def first(found: dict[str, list[str]], title: str) -> str:
        return next(of_panel[0] for name, of_panel in found.items() if name.startswith(title))

    assert 0 < value(first(of_training, "Progress")) < 1
    assert 0 <= value(first(of_training, "Last step")) < 60
    assert value(first(of_training, "Slow ranks")) in (0, 1)
    assert value(first(of_serving, "Replicas")) == 1
    assert value(first(of_serving, "Loss")) == 1
    assert value(first(of_serving, "Errors")) == 0
    assert len(series(api, first(of_training, "Work per step by rank"))) == 2
    assert len(series(api, first(of_training, "Waiting for data"))) == 2


def test_series_of_ray_have_the_names_of_the_metrics_page(api: httpx.Client) -> None:
    found = series(api, '{__name__=~"kway_.+", job="web"}')
    names = {each["metric"]["__name__"] for each in found}
    assert names == {name for name in metric_names() if not name.startswith("kway_train_")}
    assert all(each["metric"]["node"] == "127.0.0.1" for each in found)


def test_no_alert_fires_for_a_run_and_a_server(api: httpx.Client) -> None:
    found = api.get("rules").json()["data"]["groups"]
    health = {rule["name"]: rule["health"] for group in found for rule in group["rules"]}
    assert health == {alert["alert"]: "ok" for alert in alerts()}
    assert series(api, 'ALERTS{alertstate="firing"}') == []
