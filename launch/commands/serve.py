"""`kway serve`: serves a bundle over HTTP on this machine until it receives a stop signal."""

import os
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.messages import printable
from launch.options import AllowImport, Given, build, options_of, with_options
from serving.config import ServingConfig
from serving.tokens import Tokens

if TYPE_CHECKING:
    from serving.deploy.preparation import Prepared

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    given: Given,
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="bundle folder (`kway export`, `kway import`)")
    ],
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="number of processes, each with its own copy of the model; 1:4: one to four, "
            "depending on the load",
        ),
    ] = str(ServingConfig().replicas),
    no_tokens: Annotated[
        bool,
        typer.Option(
            "--no-tokens",
            help="do not require tokens, even if other machines can reach --host",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="also verify the checksum of the class weights, a large file"
        ),
    ] = False,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="print a config file for a Ray cluster (docs/serving.md) and exit",
        ),
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Serve a bundle over HTTP on this machine, with a web page at / and API docs at /docs.

    Startup takes 10 to 40 s. Prints `ready` once it accepts requests, and runs until Ctrl-C.
    """
    # Import here, so that other commands start quickly.
    from serving.deploy.preparation import prepare
    from serving.deploy.server import running
    from serving.deploy.session import free_port
    from serving.deploy.stop_signal import StopSignal

    least, most = replica_range(replicas)
    allowed = tuple(allow_import or ())
    config = build(ServingConfig, given, replicas=least, max_replicas=most, allow_imports=allowed)
    _check_access(config, no_tokens=no_tokens)
    # Report a bad bundle before Ray starts.
    prepared = prepare(bundle, config, verify=verify, on_this_machine=not print_config)
    if print_config:
        from serving.deploy.cluster import config_file

        # Keep symbolic links: another target is another version.
        typer.echo(config_file(os.path.abspath(bundle), config), nl=False)
        return
    free_port(config.host, config.port)
    if config.grpc_port is not None:
        free_port(config.host, config.grpc_port, option="--grpc-port")
    stop = StopSignal()
    if sys.stderr.isatty():
        typer.echo("starting (takes 10 to 40 s) …", err=True)
    with ExitStack() as opened_server:
        try:
            url, grpc = opened_server.enter_context(running(bundle, config, prepared))
        except (Exception, SystemExit):
            if stop.was_received:  # libraries may replace it; Ray raises SystemExit(1) instead
                raise SystemExit(0) from None
            raise
        typer.echo(f"ready: {url}  (API docs: {url}/docs; press Ctrl-C to stop)")
        line = _curl_line(prepared, has_tokens=config.token_file is not None)
        typer.echo(printable(f"curl {url}/v1/query {line}"))
        if grpc is not None:
            typer.echo(f"Open Inference Protocol over gRPC: {grpc}")
        stop.wait(url)
        typer.echo("stopping")


def _check_access(config: ServingConfig, *, no_tokens: bool) -> None:
    """Raise ValueError if other machines can reach the server without a token."""
    if config.token_file is not None:
        check_tokens(config.token_file)  # report a bad file before Ray starts
    elif config.host not in _LOOPBACK and not no_tokens:
        raise ValueError(
            f"other machines can reach --host {config.host}, and --token-file is not set: pass a "
            "token file, or --no-tokens if a proxy in front of the server authenticates clients"
        )


def check_tokens(file: Path) -> None:
    try:
        Tokens(file)
    except OSError as error:
        raise ValueError(
            f"--token-file {file} cannot be read ({error.strerror}): pass a file with one token "
            "per line; create a token with openssl rand -hex 32"
        ) from error
    except ValueError as error:
        raise ValueError(f"--token-file: {error}") from error


def replica_range(text: str) -> tuple[int, int | None]:
    """Parse `2` -> (2, None), `1:4` -> (1, 4)."""
    found = re.fullmatch(r"([1-9]\d{0,3})(?::([1-9]\d{0,3}))?", text)
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        raise ValueError(f"--replicas {text!r}: pass a number such as 2, or a range such as 1:4")
    return int(found[1]), int(found[2]) if found[2] else None


def _curl_line(prepared: "Prepared", *, has_tokens: bool) -> str:
    """Return the arguments of a curl query, with the class name quoted for the shell."""
    quoted = shlex.quote(prepared.first_class)
    inputs = "-F images=@your-image.png"
    if prepared.reads == "texts":
        inputs = "--form-string texts='A text.'"
    token = '-H "Authorization: Bearer $TOKEN" ' if has_tokens else ""
    return f"{token}--form-string classes={quoted} {inputs}"


command = with_options(serve, options_of(ServingConfig, marked_only=True))
