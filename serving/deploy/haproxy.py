"""A launcher that Ray starts instead of HAProxy; it applies kway's rules and then runs HAProxy.

Whenever the set of replicas changes, Ray writes HAProxy's configuration and starts the program
named by RAY_SERVE_HAPROXY_BINARY_PATH. This program adds kway's addresses, timeouts and error
responses to that file and then execs the real HAProxy. It rejects any configuration that it does
not recognize, so that a new version of Ray cannot silently open a port. It uses only the standard
library, so that it starts quickly.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# Characters that have no special meaning in HAProxy's regular expressions.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/:_-]*")
_PARAMETER = re.compile(r"\{\w+\}")
# Headers that Ray decodes without validation or acts on; clients must not set them.
_RAY_HEADERS = (
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "x-session-id",
    "^serve[-_]multiplexed[-_]model[-_]id$ -m reg",
)
# Ray's own pages, /-/routes and /-/healthz, do not require a token, so clients must not be able to
# reach them. Request targets that are not paths, such as `*`, are also rejected, because no backend
# accepts them.
_NO_PATH = "{ path,url_dec -m beg /-/ } || !{ path_beg / }"
# The same rule for gRPC, which has its own status codes: 12 is UNIMPLEMENTED.
_NO_RAY_SERVICE = (
    "return status 200 content-type application/grpc hdr grpc-status 12 "
    'hdr grpc-message "unknown service" if { path_beg /ray.serve. }'
)
_RAY_METADATA = ("application", "multiplexed_model_id")
# While no replica is running, HAProxy forwards requests to Ray's own proxy, a `backup` server,
# which queues them until a new replica is running. Once the application is deleted, at shutdown,
# that proxy responds with 404. kway has a route for every path, so this 404 means "not ready" and
# becomes 503: clients and caches would treat a 404 as final.
_STATUS_REPLACEMENTS = {404: 503}
# HTTP status -> gRPC status: 4 is DEADLINE_EXCEEDED, 14 UNAVAILABLE.
_GRPC_STATUSES = {408: 4, 502: 14, 503: 14, 504: 4}
# A call that lasts until the client ends it.
_HEALTH_WATCH = "{ path /grpc.health.v1.Health/Watch }"
_RETRY_SECONDS = 1
_ERRORS = {
    400: ("bad_request", "malformed HTTP request"),
    403: ("refused", "the request is not allowed"),
    404: ("no_such_path", "the path does not exist"),
    405: ("wrong_method", "the path does not support this method"),
    408: ("slow_request", "the request did not arrive in time. Send it faster"),
    429: ("too_busy", "too many requests are waiting for the model. Try again"),
    500: ("internal", "internal server error; see the server log"),
    501: ("wrong_method", "the server does not support this method"),
    502: ("replica_lost", "the replica failed while processing the request. Try again"),
    503: ("not_ready", "no replica is ready. Try again"),
    504: ("timeout", "no response in time. Try again"),
}
# This must be the last response rule. An earlier `return` replaces the response with an error and
# stops the evaluation of rules, so the error is still logged.
_LOG_ERRORS_ONLY = "    http-response set-log-level silent if { status lt 400 }"
_SECTION = re.compile(r"(global|defaults|frontend|backend|listen)\b ?(.*)")
# Lines that configure custom error pages, or logging to a local port that may have no listener.
_DROPPED_LINES = re.compile(r"log |option httplog|option log-health-checks|errorfile ")
_DROPPED_SECTIONS = {"frontend prometheus", "listen stats"}


@dataclass(frozen=True)
class RoutePaths:
    """The paths of the routes for which HAProxy has rules, such as `/v1/galleries/{name}/search`.

    `idempotent` are routes whose requests, like every GET, are retried if a replica fails before it
    responds.
    """

    idempotent: tuple[str, ...]


@dataclass(frozen=True)
class ProxySettings:
    """HAProxy's addresses, in the syntax of its `bind` lines, and its limits.

    `http_bind` and `grpc_bind` have the form address:port. Times are in seconds. `max_grpc_calls`
    limits the concurrent calls per replica. `idempotent_paths` are those of `RoutePaths`. `hosts`
    are the accepted host names, without a port; if empty, all host names are accepted. HAProxy sets
    `address_header` to the address of the client, and replaces what the client sent. `errors` is a
    FIFO that receives a line `PROTOCOL STATUS TERMINATION` for each error response.
    """

    haproxy: str
    http_bind: str
    grpc_bind: str | None
    address_header: str
    max_body_bytes: int
    head_seconds: float
    idle_seconds: float
    response_seconds: float
    idempotent_paths: tuple[str, ...] = ()
    max_grpc_calls: int = 256
    hosts: tuple[str, ...] = ()
    errors: str | None = None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "ProxySettings":
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def rewrite(text: str, settings: ProxySettings) -> str:
    """Apply the addresses and rules of `settings` to Ray's HAProxy configuration.

    Raises ValueError if the text differs from the configuration that Ray 2.60 writes.
    """
    lines = [line for section in _sections(text) for line in _rewrite_section(section, settings)]
    found = sorted(line.split()[1] for line in lines if line.split()[:1] == ["bind"])
    wanted = sorted(bind for bind in (settings.http_bind, settings.grpc_bind) if bind is not None)
    if found != wanted:
        raise ValueError(f"HAProxy would listen on {found} instead of {wanted}. Install Ray 2.60")
    return "\n".join([*lines, ""])


def _sections(text: str) -> Iterator[list[str]]:
    """Yield the sections of a configuration without comments or blank lines. Each starts with its
    title."""
    section: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not line[0].isspace():
            if section:
                yield section
            section = []
        section.append(line.rstrip())
    if section:
        yield section


def _rewrite_section(section: list[str], settings: ProxySettings) -> list[str]:
    title, *lines = section
    if _SECTION.fullmatch(title) is None:
        raise ValueError(
            f"HAProxy's configuration has an unknown section {title!r}. Install Ray 2.60"
        )
    if title in _DROPPED_SECTIONS:
        return []
    kept = [line for line in lines if not _DROPPED_LINES.match(line.strip())]
    match title:
        case "global":
            return [title, *(line.replace(" mode 666 ", " mode 600 ") for line in kept)]
        case "defaults":
            kept = [line for line in kept if not _is_replaced_timeout(line)]
            return [title, *kept, *_defaults(settings)]
        case "frontend http_frontend":
            log = _error_log(settings, "http")
            own = [f"    bind {settings.http_bind}", *log, *_rules(settings)]
            return [title, *own, *_without_bind(kept)]
        case "frontend grpc_frontend":
            bind = f"    bind {settings.grpc_bind} proto h2"
            return [
                title,
                bind,
                *_error_log(settings, "grpc"),
                *_grpc_rules(settings),
                *_without_bind(kept),
            ]
        case "backend default_backend":  # no application is deployed
            return [title, "    http-request return " + _error_response(503)]
        case "backend default_grpc_backend":
            return [title, "    http-request return " + _grpc_error_response(503)]
    if title.startswith("backend grpc-"):
        return [title, *_grpc_backend(kept, settings)]
    if title.startswith("backend http-"):
        kept.append(f"    http-request set-timeout server {_time(settings.response_seconds)}")
    return [title, *kept]


def _is_replaced_timeout(line: str) -> bool:
    return line.split()[:2] in (
        ["timeout", "client"],
        ["timeout", "server"],
        ["timeout", "http-request"],
    )


def _without_bind(lines: list[str]) -> list[str]:
    return [line for line in lines if line.split()[0] != "bind"]


def _defaults(settings: ProxySettings) -> list[str]:
    return [
        # When a new HAProxy process replaces the old one, the old one answers another request on
        # each open connection before it closes the connection, because most clients do not retry.
        "    option idle-close-on-response",
        f"    timeout http-request {_time(settings.head_seconds)}",
        f"    timeout client {_time(settings.idle_seconds)}",
        "    timeout server 1h",  # for health watches; a rule sets the timeout of other requests
        "    timeout tunnel 1h",
        *(f"    http-error {_error_response(status)}" for status in sorted(_ERRORS)),
    ]


def _error_log(settings: ProxySettings, protocol: str) -> list[str]:
    """Log responses to standard output, which `main` connects to the FIFO."""
    if settings.errors is None:
        return []
    return [
        "    log stdout format raw local0",
        f'    log-format "{protocol} %ST %ts"',
        "    option dontlognull",  # skip connections without a request
    ]


def _rules(settings: ProxySettings) -> list[str]:
    too_large = f"the body is larger than {settings.max_body_bytes} bytes. Split the request"
    body = _body("body_too_large", too_large)
    rules = [
        *_host_rules(settings),
        f"return {_error_response(404)} if {_NO_PATH}",
        # Check the declared size: the Content-Length or the size of the first chunk.
        f"return status 413 content-type application/json string '{body}' "
        f"if {{ req.body_size gt {settings.max_body_bytes} }}",
        *(f"del-header {name}" for name in _RAY_HEADERS),
        _address_rule(settings),
        _drop_unless_name("x-request-id"),
        # Never retry requests that are not idempotent.
        f"disable-l7-retry unless METH_GET || {_is_one_of(settings.idempotent_paths)}",
        # Wait here for bodies that arrive slowly, so they do not occupy a replica. A body that is
        # larger than the buffer is forwarded as it arrives, and the replica enforces the time
        # limit.
        f"wait-for-body time {_time(settings.head_seconds)}",
    ]
    # Ray's own error responses are plain text; kway's are already JSON.
    answers = [
        *(
            f"return {_error_response(_STATUS_REPLACEMENTS.get(status, status))} if "
            f"{_plain(status)}"
            for status in sorted(_ERRORS)
        ),
    ]
    return [
        "    option disable-h2-upgrade",  # HTTP/2 is not required on this port
        *(f"    http-request {rule}" for rule in rules),
        *(f"    http-response {answer}" for answer in answers),
        _LOG_ERRORS_ONLY,
    ]


def _is_one_of(paths: Iterable[str]) -> str:
    """Return a condition that is true if the path of the request is one of `paths`.

    Like routes, the condition matches the decoded path, in which `%3A` is `:`.
    """
    return f"{{ path,url_dec -m reg ^({'|'.join(map(_pattern, paths))})$ }}"


def _pattern(path: str) -> str:
    """Convert a path such as `/v1/galleries/{name}/search` to a regular expression. Raises
    ValueError for unsupported characters."""
    literals = _PARAMETER.split(path)
    if not all(_PLAIN_PATH.fullmatch(literal) for literal in literals):
        raise ValueError(
            f"route {path!r} contains unsupported characters. Use letters, digits and / : _ -"
        )
    return "[^/]+".join(literals)


def _host_rules(settings: ProxySettings) -> list[str]:
    """Reject other host names to prevent DNS rebinding, in which a web page points its own domain
    name at this server and queries it through the visitor's browser."""
    if not settings.hosts:
        return []
    message = (
        f"without --token-file, this server accepts only the host names {', '.join(settings.hosts)}"
    )
    return [
        "return status 403 content-type application/json "
        f"string '{_body('other_host', message)}' "
        f"unless {{ req.fhdr(host),host_only -m str -i {' '.join(settings.hosts)} }}"
    ]


def _grpc_rules(settings: ProxySettings) -> list[str]:
    """Return the rules for gRPC calls."""
    rules = [
        _NO_RAY_SERVICE,
        *(f"del-header {name}" for name in _RAY_METADATA),
        _address_rule(settings),
        _drop_unless_name("request_id"),
        # Do not wait for the body of a streaming call, which the client may keep open indefinitely.
        # The replica responds that streaming is not supported.
        f"wait-for-body time {_time(settings.head_seconds)} unless {{ path_end StreamInfer }}",
    ]
    return [
        f"    http-error {_grpc_error_response(408)}",
        *(f"    http-request {rule}" for rule in rules),
        _LOG_ERRORS_ONLY,
    ]


def _grpc_backend(lines: list[str], settings: ProxySettings) -> list[str]:
    """Return a backend of replicas, without Ray's own proxy as a backup.

    At shutdown, that proxy returns NOT_FOUND in the trailers of a response, and HAProxy cannot read
    or replace trailers. Without that proxy, a call fails with UNAVAILABLE, and clients retry it.
    """
    return [
        # maxconn includes calls whose messages are still arriving, because a replica holds them in
        # memory before it checks the token.
        *(_with_maxconn(line, settings) for line in lines if not line.endswith(" backup")),
        f"    http-request set-timeout server {_time(settings.response_seconds)} "
        f"unless {_HEALTH_WATCH}",
        *(f"    http-error {_grpc_error_response(status)}" for status in _GRPC_STATUSES),
    ]


def _grpc_error_response(status: int) -> str:
    """Return a response with the HTTP status `status` and the corresponding gRPC status."""
    return (
        f"status {status} content-type application/grpc hdr grpc-status {_GRPC_STATUSES[status]} "
        f'hdr grpc-message "{_ERRORS[status][1]}"'
    )


def _with_maxconn(line: str, settings: ProxySettings) -> str:
    return f"{line} maxconn {settings.max_grpc_calls}" if line.split()[0] == "server" else line


def _address_rule(settings: ProxySettings) -> str:
    return f"set-header {settings.address_header} %[src]"


def _drop_unless_name(header: str) -> str:
    """Drop a header unless it occurs exactly once and its value is a single plain word.

    `req.hdr` would split the value at commas and accept it if one part matches, so the rule uses
    `req.fhdr`.
    """
    is_a_name = f"{{ req.fhdr({header}) -m reg ^[A-Za-z0-9._-]{{1,100}}$ }}"
    return f"del-header {header} unless {{ req.fhdr_cnt({header}) 1 }} {is_a_name}"


def _error_response(status: int) -> str:
    retry = f" hdr Retry-After {_RETRY_SECONDS}" if status in (429, 502, 503, 504) else ""
    body = _body(*_ERRORS[status])
    return f"status {status} content-type application/json{retry} string '{body}'"


def _plain(status: int) -> str:
    return f"{{ status {status} }} {{ res.hdr(content-type) -m beg text/plain }}"


def _body(code: str, message: str) -> str:
    """Return an `ErrorBody` (`serving/schemas.py`) that can be placed in single quotes."""
    body = json.dumps({"error": {"code": code, "message": message}})
    assert "'" not in body
    return body


def _time(seconds: float) -> str:
    return f"{max(1, round(1000 * seconds))}ms"


def main(settings_file: str, *arguments: str) -> None:
    """Rewrite the file after `-f` in place and exec HAProxy with the same arguments."""
    settings = ProxySettings.load(Path(settings_file))
    path = Path(arguments[arguments.index("-f") + 1])
    path.write_text(rewrite(path.read_text(encoding="utf-8"), settings), encoding="utf-8")
    if settings.errors is not None:
        # HAProxy drops log lines that do not fit into the FIFO. Open it for reading as well,
        # because a write-only open fails if the FIFO has no reader.
        os.dup2(os.open(settings.errors, os.O_RDWR | os.O_NONBLOCK), sys.stdout.fileno())
    os.execv(settings.haproxy, [settings.haproxy, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
