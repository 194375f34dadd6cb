"""`kway serve`: a bundle behind HTTP on this machine, until a signal ends it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.wording import printable
from serving.config import ServingConfig

if TYPE_CHECKING:
    from trainer.bundle import Bundle

_DEFAULTS = ServingConfig()
_MAX_BODY_MIB = 4096
_MAX_SECONDS = 3600


def serve(
    bundle: Annotated[Path, typer.Argument(help="bundle folder, made by `kway export`")],
    host: Annotated[str, typer.Option(help="address to listen on")] = _DEFAULTS.host,
    port: Annotated[
        int, typer.Option(help="port to listen on; 0: any free one", min=0, max=65535)
    ] = _DEFAULTS.port,
    replicas: Annotated[
        int, typer.Option(help="processes that each hold the model", min=1)
    ] = _DEFAULTS.replicas,
    threads: Annotated[
        int | None, typer.Option(help="torch threads a replica; default: share the cores", min=1)
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="texts, or crops of pictures, in one forward pass", min=1)
    ] = _DEFAULTS.batch_size,
    batch_wait: Annotated[
        float,
        typer.Option(
            help="seconds an idle replica waits for a batch to fill", min=0, max=_MAX_SECONDS
        ),
    ] = _DEFAULTS.batch_wait_seconds,
    max_requests: Annotated[
        int, typer.Option(help="requests in progress a replica; beyond it: 429", min=1)
    ] = _DEFAULTS.max_requests,
    max_inputs: Annotated[
        int, typer.Option(help="pictures or texts in one request", min=1)
    ] = _DEFAULTS.max_inputs,
    max_text_chars: Annotated[
        int, typer.Option(help="characters of one text", min=1)
    ] = _DEFAULTS.max_text_chars,
    max_body_mib: Annotated[
        float,
        typer.Option(help="MiB of one request's body", min=0.001, max=_MAX_BODY_MIB),
    ] = _DEFAULTS.max_body_bytes / 2**20,
    timeout: Annotated[
        float,
        typer.Option(help="seconds that one request may take", min=0.1, max=_MAX_SECONDS),
    ] = _DEFAULTS.request_timeout_seconds,
) -> None:
    """Serve a bundle with Ray: POST /v1/query, GET /v1/classes, /v1/model, /health, /metrics."""
    # Heavy imports wait for the command that needs them.
    from serving.deploy.server import StopSignal, free_port, running
    from trainer.bundle import Bundle

    config = ServingConfig(
        host=host,
        port=port,
        replicas=replicas,
        threads=threads,
        batch_size=batch_size,
        batch_wait_seconds=batch_wait,
        max_requests=max_requests,
        max_inputs=max_inputs,
        max_text_chars=max_text_chars,
        max_body_bytes=int(max_body_mib * 2**20),
        request_timeout_seconds=timeout,
    )
    free_port(host, port)
    with Bundle.open(bundle) as opened:  # a bad bundle is an error now, not after Ray's start
        line = _curl_line(opened)
        opened.verify()
    stop = StopSignal()
    with running(bundle, config) as url:
        typer.echo(f"ready: {url}  (documentation at {url}/docs, Ctrl-C ends it)")
        typer.echo(printable(f"curl {url}/v1/query {line}"))
        stop.hold(url)
        typer.echo("stopping")


def _curl_line(bundle: "Bundle") -> str:
    """A question to paste into a shell, whatever characters the class name has."""
    quoted = "'" + bundle.names.names[0].replace("'", "'\\''") + "'"
    asked = "-F images=@picture.png"
    if bundle.spec.reads == "texts":
        asked = "--form-string texts='A text.'"
    return f"--form-string classes={quoted} {asked}"
