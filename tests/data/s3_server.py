"""A local server with the S3 API."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start a server with the bucket `bucket`, and yield the variables that select it.

    They are also set in this process.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with (
        subprocess.Popen([sys.executable, "-P", "-c", _SERVER], text=True, **pipes) as process,
        pytest.MonkeyPatch.context() as patches,
    ):
        try:
            variables = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(process.stdout.readline())}",
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            }
            for name, value in variables.items():
                patches.setenv(name, value)
            # fsspec keeps the connections to the server of an earlier test.
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            fsspec.filesystem("s3").mkdir("bucket")
            yield variables
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            process.stdin.close()


def objects(url: str) -> dict[str, bytes]:
    """Return the contents of all objects below a URL, keyed by name."""
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    prefix = url.partition("://")[2] + "/"
    # If the first object appears during the call, s3fs returns the folder itself.
    found = [name for name in files.find(prefix) if name.startswith(prefix)]
    return {name.removeprefix(prefix): files.cat_file(name) for name in found}
