"""The private names of other libraries that kway uses still exist and still work as expected.

A failure means that a new version of Ray, uvicorn or gRPC has changed one of them. Check whether
the new version has a public option; otherwise adapt the module named in the failure.
"""

import re
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = Path("serving/deploy/environment.py")


def run(code: str) -> str:
    """Return the output of `code` in a new interpreter, because the patches affect the entire
    process."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.strip()


def test_requests_that_bypass_ray_are_counted_as_ongoing_requests_of_the_replica() -> None:
    output = run("""
import os
from serving.deploy.ingress import MIDDLEWARES, middlewares, serve_directly
os.environ.update(MIDDLEWARES)
import asyncio
from ray.serve._private import constants, http_util
from ray.serve._private.replica import Replica, ReplicaMetricsManager

replica = Replica.__new__(Replica)
manager = replica._metrics_manager = ReplicaMetricsManager.__new__(ReplicaMetricsManager)
manager._num_ongoing_requests, manager._ingress = 0, True
manager._ingress_metrics, manager._cached_metrics_enabled = {}, True
replica._reserved_slots = set()
seen = []

async def own(scope, receive, send):
    seen.append((scope["path"], replica.get_num_ongoing_requests()))

async def rays(self, scope, receive, send):
    seen.append((scope["path"], "ray"))

async def send(message):
    seen.append(message.get("status"))

Replica._direct_ingress_asgi = rays
options = http_util.configure_http_middlewares(http_util.HTTPOptions())

def ask(path, kind="http"):
    scope = {"type": kind, "path": path, "headers": []}
    scope["extensions"] = {"websocket.http.response": {}}
    asyncio.run(http_util._apply_middlewares(replica._direct_ingress_asgi, options.middlewares)(
        scope, None, send))

ask("/a")
serve_directly(own, 1)
ask("/a")
ask("/-/healthz")
serve_directly(own, 0)
ask("/a")
ask("/a", "websocket")
print(*seen, replica.get_num_ongoing_requests())
""")
    assert output == "('/a', 'ray') ('/a', 1) ('/-/healthz', 'ray') 429 None 429 None 0"


def test_ray_daemons_start_in_their_own_process_groups() -> None:
    output = run("""
import os, subprocess, sys
from ray._private import services
from serving.deploy.private_ray import own_process_groups
before = services.ConsolePopen
code = "import os; print(os.getpgid(0) == os.getpid())"
with own_process_groups():
    started = services.start_ray_process([sys.executable, "-c", code], "x", False)
    started.process.wait()
assert services.ConsolePopen is before
""")
    assert output == "True"


def test_ray_starts_without_its_autoscaler_log_monitor_and_dashboard() -> None:
    output = run("""
import tempfile
from ray._private import parameter, services
before = parameter.RayParams, services.start_api_server
from serving.deploy.private_ray import local_options, without_unused_daemons
import ray
with tempfile.TemporaryDirectory() as folder, without_unused_daemons():
    ray.init(address="local", num_cpus=1, log_to_driver=False, include_dashboard=False,
             configure_logging=False, **local_options("127.0.0.1", folder))
    print(*ray._private.worker._global_node.all_processes)
    ray.shutdown()
assert before == (parameter.RayParams, services.start_api_server)
""")
    assert set(output.splitlines()[-1].split()) == {"gcs_server", "raylet"}


def test_ray_serve_imports_without_pandas_which_can_be_imported_afterwards(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("value = 1")
    output = run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from serving.deploy.private_ray import hide_pandas, unhide_pandas
hide_pandas()
import ray.serve
unhide_pandas()
print("pandas" in sys.modules)
import pandas
unhide_pandas()
print(sys.modules["pandas"].value)
""")
    assert output.split() == ["False", "1"]


def test_ray_still_recognizes_every_configured_name() -> None:
    """Ray ignores unknown environment variables and arguments."""
    output = run("""
import inspect, pathlib, ray, ray.serve
from ray._private import ray_constants
from serving.deploy.private_ray import WORKER_SETUP_HOOK_VARIABLE, local_options
assert WORKER_SETUP_HOOK_VARIABLE == ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
source = inspect.getsource(inspect.unwrap(ray.init))
assert not [name for name in local_options("", "") if f'"{name}"' not in source]
folder = pathlib.Path(ray.serve.__file__).parent / "_private"
print("".join(path.read_text() for path in folder.glob("*.py")))
""")
    wanted = set(re.findall(r'"(RAY_SERVE_\w+)"', ENVIRONMENT.read_text()))
    assert len(wanted) > 10
    assert {name for name in wanted if f'"{name}"' not in output} == set()


def test_uvicorn_accepts_the_option_and_drops_trailers() -> None:
    output = run("""
import socket, threading, time
import uvicorn
from serving.deploy.private_uvicorn import drop_trailers, use_httptools
drop_trailers()
use_httptools()

async def app(scope, receive, send):
    while (await receive())["more_body"]:
        pass
    names = b" ".join(name for name, _ in scope["headers"])
    headers = [(b"content-length", str(len(names)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": names})

config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
assert config.http == 'httptools'
server = uvicorn.Server(config)
thread = threading.Thread(target=server.run)
thread.start()
while not server.started:
    time.sleep(0.01)
address = server.servers[0].sockets[0].getsockname()
with socket.create_connection(address) as client:
    head = b"POST / HTTP/1.1\\r\\nHost: x\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
    client.sendall(head + b"1\\r\\na\\r\\n0\\r\\nX-Trailer: b\\r\\n\\r\\n")
    answer = b""
    while part := client.recv(4096):
        answer += part
server.should_exit = True
thread.join()
print(answer.split(b"\\r\\n\\r\\n")[1].decode())
""")
    assert output == "host transfer-encoding"


def test_grpc_servers_that_bind_to_all_addresses_listen_on_loopback() -> None:
    output = run("""
import asyncio, grpc, psutil
from serving.deploy.private_grpc import bind_servers_to_loopback
bind_servers_to_loopback()
bind_servers_to_loopback()

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("[::]:0")
    await server.start()
    found = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert [one.port for one in found] == [port]
    print(found[0].ip)
    await server.stop(0)

asyncio.run(main())
""")
    assert output in ("127.0.0.1", "::ffff:127.0.0.1")


def test_the_error_for_a_changed_library_contains_its_version() -> None:
    output = run("""
from ray.serve._private import http_util
from serving.deploy import private_ray
http_util.uvicorn = None
for check, *arguments in (
    (private_ray.ongoing_requests_of, print), (private_ray.check_replicas_use_uvicorn,)
):
    try:
        check(*arguments)
    except RuntimeError as error:
        print(error)
""")
    first, second = output.splitlines()
    assert re.match(r"Ray [\d.]+ is not supported: .*count of requests.*Ray 2\.60", first)
    assert "uvicorn.Config" in second
