"""`kway serve`: a bundle behind HTTP on this machine, until a signal ends it."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from launch.commands.allow_import import AllowImport
from launch.wording import printable
from serving.config import GALLERY_NAME, ServingConfig
from serving.tokens import Tokens

if TYPE_CHECKING:
    from trainer.bundle.bundle import Bundle

_DEFAULTS = ServingConfig()
_MAX_BODY_MIB = 4096
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_SECONDS = 3600
Device = Literal["cpu", "cuda"]


def serve(
    bundle: Annotated[Path, typer.Argument(help="bundle folder, made by `kway export`")],
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine's")
    ] = _DEFAULTS.host,
    port: Annotated[
        int, typer.Option(help="port to listen on; 0: any free one", min=0, max=65535)
    ] = _DEFAULTS.port,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            help="port of the Open Inference Protocol over gRPC, 0: any free one; default: no gRPC",
            min=0,
            max=65535,
        ),
    ] = _DEFAULTS.grpc_port,
    replicas: Annotated[
        str,
        typer.Option(
            help="processes that each hold the model; 1:4: one, and up to four while there is work"
        ),
    ] = str(_DEFAULTS.replicas),
    device: Annotated[
        Device, typer.Option(help="cuda: each replica has a GPU of its own")
    ] = _DEFAULTS.device,
    threads: Annotated[
        int | None,
        typer.Option(
            help="threads that a replica computes with; default: the cores, shared among replicas",
            min=1,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            help="texts, or crops of pictures, at most, that the model takes in one pass", min=1
        ),
    ] = _DEFAULTS.batch_size,
    batch_wait: Annotated[
        float,
        typer.Option(
            help="seconds that an idle replica waits for more to come into one pass",
            min=0,
            max=_MAX_SECONDS,
        ),
    ] = _DEFAULTS.batch_wait_seconds,
    max_requests: Annotated[
        int,
        typer.Option(
            help="requests that one replica works on at once; more are refused (429)", min=1
        ),
    ] = _DEFAULTS.max_requests,
    max_inputs: Annotated[
        int, typer.Option(help="most pictures or texts in one request", min=1)
    ] = _DEFAULTS.max_inputs,
    max_text_chars: Annotated[
        int, typer.Option(help="most characters of one text", min=1)
    ] = _DEFAULTS.max_text_chars,
    max_body_mib: Annotated[
        float,
        typer.Option(help="most MiB of one request's body", min=0.001, max=_MAX_BODY_MIB),
    ] = _DEFAULTS.max_body_bytes / 2**20,
    timeout: Annotated[
        float,
        typer.Option(
            help="seconds that one request may take, its sending included",
            min=0.1,
            max=_MAX_SECONDS,
        ),
    ] = _DEFAULTS.request_timeout_seconds,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="file of tokens, one a line: clients must send one; default: all are let in"
        ),
    ] = None,
    no_tokens: Annotated[
        bool,
        typer.Option(
            "--no-tokens", help="allow a --host that others can reach, though all are let in"
        ),
    ] = False,
    gallery: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER: a gallery of `kway index`, and the name to search it by; repeatable"
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="check the file of class weights, too, which reads all of it"
        ),
    ] = False,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="start nothing: print a config file for a Ray cluster (docs/cluster.md)",
        ),
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Serve a bundle over HTTP on this machine: a page at /, the API and its description at /docs.

    It is ready when it says so, after 10 to 40 s, and runs until Ctrl-C.
    """
    # Heavy imports wait for the command that needs them.
    from serving.deploy.ports import free_port
    from serving.deploy.server import running
    from serving.deploy.stop_signal import StopSignal
    from serving.galleries.gallery import Gallery
    from serving.model import check_imports
    from trainer.bundle.bundle import Bundle

    least, most = _replicas(replicas)
    _check_access(host, token_file, no_tokens=no_tokens)

    if grpc_port and grpc_port == port:
        raise ValueError(f"--port and --grpc-port are both {port}: give two")
    config = _config(
        host=host,
        port=port,
        grpc_port=grpc_port,
        replicas=least,
        max_replicas=most,
        device=device,
        threads=threads,
        batch_size=batch_size,
        batch_wait_seconds=batch_wait,
        max_requests=max_requests,
        max_inputs=max_inputs,
        max_text_chars=max_text_chars,
        max_body_bytes=int(max_body_mib * 2**20),
        request_timeout_seconds=timeout,
        token_file=token_file.absolute() if token_file is not None else None,
        galleries=_galleries(gallery or []),
        allow_imports=tuple(allow_import or ()),
    )
    with Bundle.open(bundle) as opened:  # a bad bundle is an error now, not after Ray's start
        check_imports(opened, device, config.allow_imports)
        line = _curl_line(opened, has_tokens=token_file is not None)
        opened.verify(class_weights=verify)
        for folder in config.galleries.values():
            Gallery(folder, opened).verify()
    if print_config:
        from serving.deploy.cluster import config_file

        typer.echo(config_file(str(bundle.resolve()), config), nl=False)
        return
    free_port(host, port)
    if grpc_port is not None:
        free_port(host, grpc_port, option="--grpc-port")
    stop = StopSignal()
    if sys.stderr.isatty():
        typer.echo("starting, which takes 10 to 40 s …", err=True)
    with ExitStack() as opened_server:
        try:
            url, grpc = opened_server.enter_context(running(bundle, config))
        except Exception:
            if stop.was_asked:  # libraries make errors of their own of an exit that comes upon them
                raise SystemExit(0) from None
            raise
        typer.echo(f"ready: {url}  (a page; its API at {url}/docs; Ctrl-C ends it)")
        typer.echo(printable(f"curl {url}/v1/query {line}"))
        if grpc is not None:
            typer.echo(f"Open Inference Protocol over gRPC: {grpc}")
        stop.hold(url)
        typer.echo("stopping")


def _config(**fields: object) -> ServingConfig:
    try:
        return ServingConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = " ".join(f"--{part}".replace("_", "-") for part in first["loc"][:1])
        raise ValueError(f"{where} {first['msg'].removeprefix('Value error, ')}".strip()) from error


def _check_access(host: str, token_file: Path | None, *, no_tokens: bool) -> None:
    """ValueError for a server that others can reach and that asks nobody for a token."""
    if token_file is not None:
        _check_tokens(token_file)  # a bad file is an error now, not after Ray's start
    elif host not in _LOOPBACK and not no_tokens:
        raise ValueError(
            f"--host {host} lets others reach this server, and there is no --token-file: give one, "
            "or --no-tokens where something in front of it asks who they are"
        )


def _check_tokens(file: Path) -> None:
    try:
        Tokens(file)
    except OSError as error:
        raise ValueError(
            f"--token-file {file} cannot be read ({error.strerror}): name a file with a token a "
            "line; openssl rand -hex 32 makes one"
        ) from error
    except ValueError as error:
        raise ValueError(f"--token-file: {error}") from error


def _replicas(text: str) -> tuple[int, int | None]:
    """`2` -> (2, None); `1:4` -> (1, 4)."""
    found = re.fullmatch(r"([1-9]\d{0,3})(?::([1-9]\d{0,3}))?", text)
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        raise ValueError(f"--replicas {text!r}: give a number such as 2, or a range such as 1:4")
    return int(found[1]), int(found[2]) if found[2] else None


def _galleries(given: list[str]) -> dict[str, Path]:
    galleries: dict[str, Path] = {}
    for text in given:
        name, separator, folder = text.partition("=")
        if not separator or not folder or name in galleries:
            raise ValueError(f"--gallery {text!r}: give NAME=FOLDER, each name once")
        if re.fullmatch(GALLERY_NAME, name) is None:
            raise ValueError(
                f"--gallery {text!r}: a name stands in URLs: give up to 64 letters of a to z or "
                "A to Z, digits and . _ -"
            )
        galleries[name] = Path(folder).absolute()
    return galleries


def _curl_line(bundle: "Bundle", *, has_tokens: bool) -> str:
    """A question to paste into a shell, whatever characters the class name has."""
    quoted = "'" + bundle.names.names[0].replace("'", "'\\''") + "'"
    asked = "-F images=@your-picture.png"
    if bundle.spec.reads == "texts":
        asked = "--form-string texts='A text.'"
    token = '-H "Authorization: Bearer $TOKEN" ' if has_tokens else ""
    return f"{token}--form-string classes={quoted} {asked}"
