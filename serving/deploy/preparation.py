"""Check the bundle and galleries of a server in a process that exits afterwards.

Opening a bundle and importing the routes requires PyTorch, transformers and FastAPI. If the `kway
serve` process imported them, it would keep more than 300 MB for as long as the server runs.

Run as a module, this is the process that checks. Its standard input is a pipe that the server keeps
open. When the pipe is closed, the process exits, even if the server was killed with SIGKILL.
"""

import json
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict

from data.retry import TransientError, is_transient
from serving.config import ServingConfig
from serving.deploy.haproxy import RoutePaths

_PACKAGES = Path(__file__).parents[2]


class Prepared(BaseModel):
    """What a server must know about its bundle and routes."""

    model_config = ConfigDict(frozen=True)

    first_class: str
    reads: str
    routes: RoutePaths


def prepare(
    bundle: Path, config: ServingConfig, *, verify: bool = False, on_this_machine: bool = True
) -> Prepared:
    """Check the bundle and galleries in another process and return what the server needs to know.

    Set `verify` to also verify the checksum of the class weights. If `on_this_machine` is false, do
    not check that this machine can run the bundle. Raises ValueError, or TransientError if the
    check may succeed the next time, if the bundle or a gallery cannot be served or requires an
    import that is not allowed, and ModuleNotFoundError if a package is missing.
    """
    options = {"verify": verify, "on_this_machine": on_this_machine}
    arguments = [str(bundle), json.dumps(config.model_dump(mode="json")), json.dumps(options)]
    paths = filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH")))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # do not receive signals sent to our process group
    )
    with process:
        assert process.stdout is not None
        try:
            reply = process.stdout.read()
            code = process.wait()
        finally:
            process.kill()
    if code < 0:
        raise ChildProcessError(f"the process that checks {bundle} was killed by signal {-code}")
    if code > 0:  # Python has printed a traceback
        raise SystemExit(code)
    return _result(json.loads(reply.splitlines()[-1]))


def _result(reply: dict[str, Any]) -> Prepared:
    if "error" not in reply:
        return Prepared.model_validate(reply)
    message = reply["error"]
    error: Exception = ValueError(message)
    if reply["missing_module"] is not None:
        error = ModuleNotFoundError(message, name=reply["missing_module"])
    elif reply["is_transient"]:
        error = TransientError(message)
    error.add_note(reply["traceback"])  # `kway --traceback serve` prints it
    raise error


# -- in the process that checks ----------------------------------------------------------------


def main() -> None:
    """Check what the arguments name. The last line of standard output is the result or
    the error."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    bundle, config, options = sys.argv[1:]
    checked = ServingConfig.model_validate(json.loads(config))
    reply = _reply(Path(bundle), checked, **json.loads(options))
    print(f"\n{json.dumps(reply)}")


def _exit_with_parent() -> NoReturn:
    os.read(0, 1)  # unlike sys.stdin, it does not hold a lock at exit
    os._exit(1)


def _reply(bundle: Path, config: ServingConfig, **options: bool) -> dict[str, Any]:
    try:
        return check(bundle, config, **options).model_dump(mode="json")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return {
            "error": str(error),
            "is_transient": is_transient(error),
            "missing_module": error.name if isinstance(error, ModuleNotFoundError) else None,
            "traceback": traceback.format_exc(),
        }


def check(bundle: Path, config: ServingConfig, *, verify: bool, on_this_machine: bool) -> Prepared:
    """Do the work of `prepare` in this process. Raises the same errors, and OSError."""
    from serving.galleries.gallery import Gallery
    from serving.model import check_imports
    from trainer.backbone.precision import check_device
    from trainer.bundle.bundle import Bundle

    opened = Bundle.open(bundle)
    check_device(opened.spec.precision, config.device, on_this_machine=on_this_machine)
    check_imports(opened, config.device, config.allow_imports)
    opened.verify(class_weights=verify)
    for folder in config.galleries.values():
        Gallery(folder, opened).verify()
    return Prepared(
        first_class=opened.names.names[0], reads=opened.spec.reads, routes=route_paths()
    )


def route_paths() -> RoutePaths:
    """Return the paths for which HAProxy has rules."""
    from serving.http.app import ROUTERS
    from serving.http.routing import paths_of

    return RoutePaths(idempotent=paths_of(ROUTERS, lambda route: route.is_idempotent))


if __name__ == "__main__":
    main()
