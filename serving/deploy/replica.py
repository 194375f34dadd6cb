"""The model and the HTTP application in a replica's process."""

import asyncio
import gc
from pathlib import Path

import ray
import torch
from fastapi import FastAPI

from serving.config import ServingConfig
from serving.deploy.ingress import serve_directly
from serving.deploy.metrics import (
    QueryMetrics,
    ReloadMetrics,
    ReplicaMetrics,
    agent_pages,
)
from serving.deploy.metrics_page import exposition
from serving.deploy.private_grpc import bind_servers_to_loopback
from serving.deploy.private_ray import check_replicas_use_uvicorn
from serving.deploy.private_uvicorn import drop_trailers, use_httptools
from serving.http.app import build_api
from serving.inference.methods import InferenceMethods
from serving.models.loading import Loader
from serving.models.reloading import Reloader
from serving.tokens import Clients


class Replica:
    """Opens the model and starts to report metrics and to load new versions. `methods` are the
    gRPC methods."""

    def __init__(self, bundle: Path, config: ServingConfig) -> None:
        if ray.util.get_node_ip_address() == "127.0.0.1":
            bind_servers_to_loopback()
        drop_trailers()
        check_replicas_use_uvicorn()
        use_httptools()
        # Set this before opening the model, which may start its own threads.
        torch.set_num_threads(config.threads_per_replica)
        reloader = Reloader(Loader(bundle, config, QueryMetrics()), ReloadMetrics())
        self.model = reloader.model
        ReplicaMetrics(self.model.state).start()
        self._clients = Clients.of_file(config.token_file, config.client_address_header)
        self.methods = InferenceMethods(self.model, self._clients)
        # Exclude the hundreds of thousands of permanent objects from garbage collection: each full
        # collection would block all requests for a tenth of a second or more.
        gc.collect()
        gc.freeze()
        reloader.start()

    def api(self, max_ongoing_requests: int) -> FastAPI:
        """Build the application and make this process's HTTP server use it."""
        api = build_api(self.model, self._clients, metrics_page)
        serve_directly(api, max_ongoing_requests)
        return api


async def metrics_page() -> bytes:
    """Return the metrics of all replicas."""
    return await exposition(await asyncio.to_thread(agent_pages))
