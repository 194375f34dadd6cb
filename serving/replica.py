"""One replica: the model, its current version, and the HTTP and gRPC interfaces to it.

`serving/on_ray.py` and `serving/on_uvicorn.py` run replicas.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from serving.app import build_app
from serving.config import ServingConfig
from serving.galleries.gallery import Gallery
from serving.inference.methods import InferenceMethods
from serving.metrics import Exporter, Metrics
from serving.model import check_imports
from serving.overrides import read_overrides
from serving.tokens import Clients
from serving.versions import ServedModel
from trainer.backbone.precision import check_device
from trainer.bundle.bundle import Bundle


class Replica:
    """Opens the model, reports metrics and loads new versions. `app` is the ASGI application, and
    `methods` are the gRPC methods. `metrics_page` returns the response to `GET /metrics`, or is
    None if the metrics are exported elsewhere.

    Raises OSError or ValueError if the bundle or a gallery cannot be served.
    """

    def __init__(
        self,
        bundle: Path,
        config: ServingConfig,
        exporter: Exporter,
        metrics_page: Callable[[], bytes] | None = None,
    ) -> None:
        _log_to_standard_error()
        # Set this before opening the model, which may start its own threads.
        torch.set_num_threads(config.threads_per_replica)
        self.model = ServedModel(bundle, config, Metrics(exporter))
        clients = Clients(config.token_file)
        self.app = build_app(self.model, clients, metrics_page)
        self.methods = InferenceMethods(self.model, clients)
        self.model.start()


def _log_to_standard_error() -> None:
    """Print kway's log, such as versions that replace each other. Ray copies the standard error of
    replicas to its logs, and to that of `kway serve`."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("kway")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def checked(bundle: Path, config: ServingConfig, *, verify: bool, on_this_machine: bool) -> Bundle:
    """Open a bundle and check it, the galleries and the thresholds before a server starts.

    Set `verify` to also verify the checksum of the class weights, a large file. If
    `on_this_machine` is false, do not check that this machine can run the bundle. Raises OSError or
    ValueError if they cannot be served, or require an import that is not allowed.
    """
    opened = Bundle.open(bundle)
    check_device(opened.spec.precision, config.device, on_this_machine=on_this_machine)
    check_imports(opened, config.device, config.allow_imports)
    opened.verify(class_weights=verify)
    for folder in config.galleries.values():
        Gallery(folder, opened).verify()
    if config.thresholds is not None:
        read_overrides(config.thresholds, opened)
    return opened
