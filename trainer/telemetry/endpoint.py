"""Where Prometheus fetches a rank's numbers: a port a rank of the machine."""

import errno
import socket

from prometheus_client import CollectorRegistry, start_http_server

from trainer.config import TelemetryConfig

_LAST_PORT = 65_535


class Endpoint:
    """Serves a registry at `url` until it is closed."""

    def __init__(
        self, config: TelemetryConfig, local_rank: int, registry: CollectorRegistry
    ) -> None:
        """Raises OSError where the port cannot be had."""
        assert config.port is not None
        port = config.port + local_rank if config.port else 0
        if port > _LAST_PORT:
            raise ValueError(
                f"telemetry.port {config.port} + local rank {local_rank} is {port}, more than "
                f"{_LAST_PORT}: choose a lower one"
            )
        whose = f" (of local rank {local_rank})" if local_rank else ""
        try:
            self._server, self._thread = start_http_server(port, config.host, registry)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise OSError(
                    f"telemetry.host is {config.host}, no address of this machine "
                    f"({error.strerror}): give one, such as 127.0.0.1, or 0.0.0.0 for all"
                ) from error
            raise OSError(
                f"telemetry.port {port}{whose} on {config.host} cannot be used "
                f"({error.strerror}): choose another, or 0 for any free one"
            ) from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.port = self._server.server_port
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
