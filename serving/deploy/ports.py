"""Ports that nobody listens on."""

import errno
import random
import socket
from contextlib import suppress

# Below those that the system gives out by itself, so that nothing takes one meanwhile: a server may
# need half a minute until it listens. Single ones are drawn below the blocks.
_SINGLE, _LOWEST, _HIGHEST = 8_100, 12_000, 32_000
_TRIES = 100


def free_port(host: str, port: int, *, option: str = "--port") -> int:
    """`port`, or any free one for 0.

    Raises OSError when it is taken or `host` is not ours; it names the `option` that is to change.
    """
    if port == 0:
        return _any_port(host, option)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = f"stop what uses it, or give another one by {option}"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                remedy = "give an address of this machine by --host"
            raise OSError(
                f"cannot listen on {host} port {port} ({error.strerror or error}): {remedy}"
            ) from error
        return port


def _any_port(host: str, option: str) -> int:
    *most, last = random.sample(range(_SINGLE, _LOWEST), _TRIES)
    for port in most:
        with suppress(OSError):
            return free_port(host, port, option=option)
    return free_port(host, last, option=option)


def free_block(num_ports: int) -> int:
    """The first of `num_ports` ports in a row on loopback, the first two of them free just now.

    Taken at random, so that two servers do not share one: a proxy that looks for a replica that
    died must not find another server's there. Raises OSError when none is found.
    """
    for _ in range(_TRIES):
        first = random.randrange(_LOWEST, _HIGHEST - num_ports)
        with suppress(OSError):
            for port in (first + 1, first):
                free_port("127.0.0.1", port)
            return first
    raise OSError(f"no free ports on loopback between {_LOWEST} and {_HIGHEST}: end what uses them")
