"""`kway serve`: serves a bundle over HTTP on this machine until it receives a stop signal."""

import os
import shlex
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.extras import install_command
from data.messages import printable
from launch.options import AllowImport, Given, build, number_range, options_of, with_options
from serving.addresses import with_free_ports
from serving.config import LOOPBACK, ServingConfig
from serving.tokens import Clients

if TYPE_CHECKING:
    from trainer.bundle.bundle import Bundle


def serve(
    given: Given,
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="bundle folder (`kway export`, `kway import`)")
    ],
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="number of processes, each with its own copy of the model; with Ray also 1:4: one "
            "to four, depending on the load",
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
    no_ray: Annotated[
        bool,
        typer.Option("--no-ray", help="serve with uvicorn instead of Ray"),
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Serve a bundle over HTTP on this machine, with a web page at / and API docs at /docs.

    Prints `ready` once it accepts requests, and runs until Ctrl-C.
    """
    least, most = number_range("--replicas", replicas)
    limits = {"replicas": least, "max_replicas": most if most > least else None}
    config = build(ServingConfig, given, **limits, allow_imports=tuple(allow_import or ()))
    if no_ray and most > least:
        raise ValueError(f"--replicas {replicas} requires Ray: pass one number, or omit --no-ray")
    if no_ray and config.high_throughput:
        raise ValueError("--high-throughput requires Ray: omit it, or --no-ray")
    if no_ray and print_config:
        raise ValueError("--print-config prints a config file for Ray: omit it, or --no-ray")
    if not no_ray and find_spec("ray") is None:
        raise ValueError(
            f"Ray is not installed: pass --no-ray, or install it with {install_command('ray')}"
        )
    _check_access(config, no_ray=no_ray, no_tokens=no_tokens)
    config = config if print_config else with_free_ports(config)
    # Import here, so that other commands start quickly.
    from serving.stop_signal import StopSignal

    stop = StopSignal()
    from serving.replica import checked

    opened = checked(bundle, config, verify=verify, on_this_machine=not print_config)
    if print_config:
        from serving.on_ray import config_file

        # Keep symbolic links: another target is another version.
        typer.echo(config_file(os.path.abspath(bundle), config), nl=False)
        return
    curl = printable(_curl_line(opened, has_tokens=config.token_file is not None))
    if no_ray:
        from serving import on_uvicorn

        run = on_uvicorn.running if least == 1 else on_uvicorn.running_workers
        server = run(bundle, config)
    else:
        from serving import on_ray

        server = on_ray.running(bundle, config)
        if sys.stderr.isatty():
            typer.echo("starting Ray (takes 10 to 40 s) …", err=True)
    with ExitStack() as opened_server:
        try:
            addresses, check = opened_server.enter_context(server)
        except (Exception, SystemExit):
            if stop.was_received:  # libraries may replace it; Ray raises SystemExit(1) instead
                raise SystemExit(0) from None
            raise
        typer.echo(addresses.ready(curl))
        stop.wait(check)
        typer.echo("stopping")


def _check_access(config: ServingConfig, *, no_ray: bool, no_tokens: bool) -> None:
    """Raise ValueError if other machines can reach the server without a token."""
    if config.token_file is not None:
        check_tokens(config.token_file)  # report a bad file before Ray starts
        return
    reason = f"other machines can reach --host {config.host}"
    if config.host in LOOPBACK:
        if no_ray or config.grpc_port is None:
            return
        reason = "Ray's gRPC port listens on all network interfaces (unlike that of --no-ray)"
    if not no_tokens:
        raise ValueError(
            f"{reason}, and --token-file is not set: pass a token file, or --no-tokens if a proxy "
            "or a firewall in front of the server authenticates clients"
        )


def check_tokens(file: Path) -> None:
    try:
        Clients(file)
    except OSError as error:
        raise ValueError(
            f"--token-file {file} cannot be read ({error.strerror}): pass a file with one token "
            "per line; create a token with openssl rand -hex 32"
        ) from error
    except ValueError as error:
        raise ValueError(f"--token-file: {error}") from error


def _curl_line(bundle: "Bundle", *, has_tokens: bool) -> str:
    """Return the arguments of a curl query, with the class name quoted for the shell."""
    quoted = shlex.quote(bundle.classes[0].name)
    inputs = "-F images=@your-image.png"
    if bundle.spec.reads == "texts":
        inputs = "--form-string texts='A text.'"
    token = '-H "Authorization: Bearer $TOKEN" ' if has_tokens else ""
    return f"{token}--form-string classes={quoted} {inputs}"


command = with_options(serve, options_of(ServingConfig, marked_only=True))
