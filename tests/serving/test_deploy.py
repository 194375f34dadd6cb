"""The config file for a Ray cluster, which `kway serve --print-config` prints."""

import json
import subprocess
import sys
from pathlib import Path

from tests.system.processes import ROOT

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
