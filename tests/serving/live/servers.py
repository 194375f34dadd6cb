"""Configure and start the two servers for the tests in this folder."""

import sys
from pathlib import Path

from serving.config import ServingConfig
from tests.serving.started import Server, start

REPLICAS = 2
# The guarded server: REST and gRPC, with tokens and small limits.
TOKEN, OTHER_TOKEN = "a1b2c3d4" * 8, "0f1e2d3c" * 8
MAX_REQUESTS, MAX_INPUTS, MAX_BODY, TIMEOUT = 8, 4, 2**19, 5
CLIENT_REQUESTS = ServingConfig(max_requests=MAX_REQUESTS).requests_per_client
BATCH_WAIT = 0.3
# A class that only one test queries. Replicas cache the class weights that they have read.
NEVER_QUERIED = 5

_SERVE_CONFIG = """
import sys
from pathlib import Path
from serving.config import ServingConfig
from serving.deploy.preparation import prepare
from serving.deploy.server import running
from serving.deploy.stop_signal import StopSignal
stop = StopSignal()
bundle, config = Path(sys.argv[2]), ServingConfig.model_validate_json(sys.argv[-1])
with running(bundle, config, prepare(bundle, config)) as found:
    print("ready:", found.url, flush=True)
    print(flush=True)
    stop.wait(found.url)
"""


def write_tokens(path: Path, *tokens: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.touch(mode=0o600)
    temporary.write_text("\n".join(tokens) + "\n")
    temporary.rename(path)


def start_guarded(bundle: Path, tokens: Path, folder: Path) -> Server:
    """Start the guarded server in a folder with subfolders named after kway's packages. They must
    not shadow the packages.
    """
    for name in ("data", "serving"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('not the package')")
    return start(
        bundle,
        folder / "stderr",
        *("--grpc-port", 0, "--token-file", tokens, "--replicas", REPLICAS),
        *("--max-requests", MAX_REQUESTS, "--max-inputs", MAX_INPUTS, "--timeout", TIMEOUT),
        *("--max-body-mib", MAX_BODY / 2**20, "--batch-wait", BATCH_WAIT),
        start=[sys.executable, "-P", "-m", "launch"],
        cwd=folder,
    )


def serve_config(
    bundle: Path, config: ServingConfig, errors: Path, temporary: Path | None = None
) -> Server:
    """Start a server with a configuration that the command line does not have options for."""
    command = [sys.executable, "-c", _SERVE_CONFIG]
    return start(bundle, errors, config.model_dump_json(), start=command, temporary=temporary)


def start_open(bundle: Path, gallery: Path, errors: Path, temporary: Path) -> Server:
    """Start the open server: no tokens."""
    config = ServingConfig(
        port=0,
        galleries={"pets": gallery},
        replicas=REPLICAS,
        max_requests=2,
        request_timeout_seconds=20,
    )
    return serve_config(bundle, config, errors, temporary)
