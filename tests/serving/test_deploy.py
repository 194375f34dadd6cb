"""Deployment on a cluster, and replicas that start and stop."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest

from serving.addresses import free_port
from serving.config import ServingConfig
from serving.on_ray import variables
from tests.dispositions import default_signals
from tests.serving.started import (
    as_json,
    run,
)
from tests.system.processes import ROOT
from tests.waiting import wait_until

# Print the config file as the command does, and validate it and build its application as Ray does.
_PRINT_AND_BUILD = """
import contextlib, importlib, io, json, yaml
from launch.main import main
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    main()
config_file = printed.getvalue()
from ray.serve.schema import ServeDeploySchema
read = ServeDeploySchema.model_validate(yaml.safe_load(config_file))
(application,) = read.applications
module, name = application.import_path.split(":")
build = getattr(importlib.import_module(module), name)
from serving.on_ray import ClusterArguments
build(ClusterArguments.model_validate(application.args))
print(json.dumps({
    "config_file": config_file,
    "bundle": application.args["bundle"],
    "served": application.args["config"],
    "http": read.http_options.model_dump(mode="json"),
    "grpc": read.grpc_options.model_dump(mode="json"),
}))
"""


def test_the_printed_config_file_is_valid_for_serve_and_builds_the_application(
    bundle: Path,
) -> None:
    options = ("--replicas", "1:4", "--max-requests", 9, "--max-inputs", 3, "--device", "cuda")
    more = ("--allow-import", "my_package.networks:Network", "--high-throughput")
    ports = ("--grpc-port", 9000, "--no-tokens", "--max-body-mib", 8)
    arguments = ("serve", bundle, "--print-config", *options, *more, *ports)
    built = subprocess.run(
        [sys.executable, "-c", _PRINT_AND_BUILD, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert built.returncode == 0, built.stderr
    found = json.loads(built.stdout)
    assert found["bundle"] == str(bundle)
    served = found["served"]
    assert (served["replicas"], served["max_replicas"], served["device"]) == (1, 4, "cuda")
    assert (served["max_requests"], served["max_inputs"]) == (9, 3)
    assert served["allow_imports"] == ["my_package.networks:Network"]
    assert found["http"]["request_timeout_s"] > served["request_timeout_seconds"]
    assert found["grpc"]["port"] == 9000
    for variable in ("RAY_SERVE_ENABLE_HA_PROXY=1", "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=8388608"):
        assert variable in found["config_file"]


# ------------------------------------------------------------------------ tests that take minutes


def answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", trust_env=False).is_success
    return False


@pytest.mark.slow
@default_signals()
def test_the_printed_config_file_can_be_deployed(bundle: Path, images: list[Path]) -> None:
    port = free_port("127.0.0.1", 0)
    printed = run("serve", bundle, "--print-config", "--port", port)
    with TemporaryDirectory() as name:
        (Path(name) / "kway.yaml").write_text(printed.stdout)
        environment = {
            **os.environ,
            **variables(ServingConfig()),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": f"{name}/ray",
        }
        program = str(Path(sys.executable).parent / "serve")
        process = subprocess.Popen(
            [program, "run", "kway.yaml"],
            cwd=name,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(url), 120)
            answer = httpx.post(f"{url}/v1/query", json=as_json(images[:1], classes=[1, 2]))
            assert [v["class_id"] for v in answer.json()["results"][0]["verdicts"]] == [1, 2]
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
            _, remaining = psutil.wait_procs(children, timeout=60)
            for child in remaining:
                child.kill()
