"""Deployment on a Ray cluster: a Serve config file and the function that it names.

`serve deploy`, `serve run` and KubeRay's RayService accept the file. kway must be installed on all
nodes, and the bundle's folder must exist at the same path on each. Importing this module does not
import Ray.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from serving.config import ServingConfig
from serving.deploy.environment import SERVING, grpc_limits

if TYPE_CHECKING:
    from ray.serve import Application

# Not arguments of the application: the file sets them in http_options and grpc_options.
_SET_BY_CLUSTER = {"host", "port", "grpc_port"}
# Added to the request timeout to allow for processing that the timeout does not cover.
_SPARE_SECONDS = 5


class ClusterArguments(BaseModel):
    """The `args` of the application in the config file."""

    model_config = ConfigDict(extra="forbid")

    bundle: str = Field(description="bundle folder, at the same path on every node")
    config: ServingConfig = ServingConfig()


def build(arguments: ClusterArguments) -> "Application":
    """Build the application; Serve calls this with the file's `args`.

    The grace period exceeds the request timeout, so a replica that is scaled down or replaced can
    finish its remaining requests.
    """
    from serving.deploy.deployment import application

    grace_seconds = arguments.config.request_timeout_seconds + _SPARE_SECONDS
    return application(arguments.bundle, arguments.config, errors=None, grace_seconds=grace_seconds)


def config_file(bundle: str, config: ServingConfig) -> str:
    """Return a Serve config file (YAML) for the bundle folder `bundle`, with every limit
    explicit."""
    arguments = ClusterArguments(bundle=bundle, config=config).model_dump(mode="json")
    arguments["config"] = {
        name: value for name, value in arguments["config"].items() if name not in _SET_BY_CLUSTER
    }
    tree = {
        "proxy_location": "EveryNode",
        # Requests have their own timeouts.
        "http_options": {"host": config.host, "port": config.port, "request_timeout_s": None},
        **({} if config.grpc_port is None else {"grpc_options": _grpc_options(config.grpc_port)}),
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "kway",
                "route_prefix": "/",
                "import_path": f"{build.__module__}:{build.__name__}",
                "args": arguments,
            }
        ],
    }
    variables = SERVING if config.grpc_port is None else SERVING | grpc_limits(config)
    return _heading(variables) + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _grpc_options(port: int) -> dict[str, Any]:
    from serving.deploy.deployment import grpc_options

    return grpc_options(port)


def _heading(environment: Mapping[str, str]) -> str:
    variables = "".join(f"#   {name}={value}\n" for name, value in environment.items())
    return (
        "# Use with `serve deploy` or as the serveConfigV2 of a RayService. Set these variables\n"
        f"# on every node before Ray starts:\n{variables}"
        "# Ray then listens on all addresses without TLS. Run the cluster in a private network,\n"
        "# with RAY_AUTH_MODE=token, behind an ingress that limits body sizes and request times.\n"
    )
