"""The progress that a run reports to its Kubeflow TrainJob."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api.models import (
    TrainerV1alpha1UpdateTrainJobStatusRequest as UpdateTrainJobStatusRequest,
)

from tests.certificate import certificate
from tests.quiet_server import QuietServer
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from trainer.telemetry.trainjob import TrainJobStatus
from trainer.train import train

NAMES = ("URL", "CA_CERT", "TOKEN")


@dataclass
class Controller:
    """A server that replaces Kubeflow's controller and records the reports that it receives."""

    url: str
    authority: Path
    token: Path
    reported: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    answer: int = 200


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    public, private = certificate(tmp_path)
    (tmp_path / "token").write_text("first\n")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.tokens.append(self.headers["Authorization"])
            found.reported.append(json.loads(body)["trainerStatus"])
            self.send_response(found.answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = QuietServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}/status"
    found = Controller(url, public, tmp_path / "token")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield found
    server.shutdown()
    thread.join(60)
    server.server_close()


def report(status: TrainJobStatus, step: int, **metrics: float) -> None:
    status.report(step=step, num_steps=8, remaining_seconds=12.4, metrics=metrics)


def wait_for_reports(controller: Controller, times: int) -> None:
    deadline = time.monotonic() + 60
    while len(controller.reported) < times:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_the_newest_report_is_sent_and_the_last_one_is_never_skipped(
    controller: Controller,
) -> None:
    lines: list[str] = []
    status = TrainJobStatus(
        controller.url, controller.authority, controller.token, lines.append, interval_seconds=600
    )
    report(status, 1, loss=2.5, gradient_norm=float("nan"))
    wait_for_reports(controller, 1)
    controller.token.write_text("second")
    for step in (2, 3):
        report(status, step, loss=step)
    status.close()
    first, last = controller.reported
    for reported in (first, last):  # in the format of Kubeflow's own models
        sent = UpdateTrainJobStatusRequest.from_dict({"trainerStatus": reported})
        assert sent is not None
        assert sent.to_dict()["trainerStatus"].keys() == reported.keys()
    assert (first["progressPercentage"], last["progressPercentage"]) == (12, 37)
    assert first["estimatedRemainingSeconds"] == 12
    assert first["metrics"] == [{"name": "loss", "value": "2.5"}]
    assert controller.tokens == ["Bearer first", "Bearer second"]
    assert lines == []


def test_an_error_is_printed_once_and_training_continues(
    controller: Controller, tmp_path: Path
) -> None:
    lines: list[str] = []
    controller.answer = 503
    status = TrainJobStatus(
        controller.url, controller.authority, controller.token, lines.append, interval_seconds=0
    )
    for times in (1, 2):
        report(status, times)
        wait_for_reports(controller, times)
    status.close()
    (line,) = lines
    assert "503" in line
    assert "Bearer" not in line
    other = tmp_path / "other"
    other.mkdir()
    authority, _ = certificate(other)  # not the controller's certificate authority
    untrusting = TrainJobStatus(controller.url, authority, controller.token, lines.append)
    report(untrusting, 1)
    untrusting.close()
    gone = TrainJobStatus(controller.url, authority, tmp_path / "gone", lines.append)
    report(gone, 1)
    gone.close()
    assert len(controller.reported) == 2
    assert "CERTIFICATE_VERIFY_FAILED" in lines[1]
    assert "gone" in lines[2]


def test_a_missing_environment_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"KUBEFLOW_TRAINER_SERVER_{name}", raising=False)
    lines: list[str] = []
    assert TrainJobStatus.of_environment(lines.append) is None
    assert lines == []
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1/")
    assert TrainJobStatus.of_environment(lines.append) is None
    assert len(lines) == 1


def test_a_run_reports_its_progress_and_evaluation(
    controller: Controller, glyphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = (controller.url, controller.authority, controller.token)
    for name, value in zip(NAMES, values, strict=True):
        monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{name}", str(value))
    train(glyph_recipe(glyphs, tmp_path / "run"), rank_world())
    last = controller.reported[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    names = [metric["name"] for metric in last["metrics"]]
    assert names[0] == "loss"
    assert "top1" in names
