"""Check the bundles and galleries of a server in a process that exits afterwards.

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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, ConfigDict

from data.retry import TransientError, is_transient
from serving.config import ServingConfig
from serving.deploy.haproxy import RoutePaths
from serving.models.published import LastServed, paths_of_models

if TYPE_CHECKING:
    from serving.galleries.gallery import Gallery
    from trainer.bundle.bundle import Bundle

_PACKAGES = Path(__file__).parents[2]


class Prepared(BaseModel):
    """What a server must know about its bundles and routes. `versions` are those of the models by
    name. `first_class` and `reads` describe the default model."""

    model_config = ConfigDict(frozen=True)

    versions: dict[str, LastServed]
    first_class: str
    reads: str
    routes: RoutePaths


def prepare(
    bundle: Path, config: ServingConfig, *, verify: bool = False, on_this_machine: bool = True
) -> Prepared:
    """Check all bundles and galleries in another process and return what the server needs to know.

    Set `verify` to also verify the checksum of the class weights. If `on_this_machine` is false, do
    not check that this machine can run the bundles. Raises ValueError, or TransientError if the
    check may succeed the next time, if a bundle or a gallery cannot be served or requires an import
    that is not allowed, and ModuleNotFoundError if a package is missing.
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
    """Check the bundles that the arguments name. The last line of standard output is the result or
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
    from serving.model import check_imports
    from trainer.backbone.precision import check_device
    from trainer.bundle.bundle import Bundle

    paths = paths_of_models(bundle, config)
    folders = {name: Path(os.path.realpath(path)) for name, path in paths.items()}
    bundles = [Bundle.open(path) for path in paths.values()]
    for one in bundles:
        check_device(one.spec.precision, config.device, on_this_machine=on_this_machine)
        check_imports(one, config.device, config.allow_imports)
        one.verify(class_weights=verify)
    for folder in config.galleries.values():
        _open_gallery(folder, bundles).verify()
    return Prepared(
        versions={
            name: LastServed(folder=folders[name], version=one.version)
            for name, one in zip(paths, bundles, strict=True)
        },
        first_class=bundles[0].names.names[0],
        reads=bundles[0].spec.reads,
        routes=route_paths(),
    )


def _open_gallery(folder: Path, bundles: "Sequence[Bundle]") -> "Gallery":
    """Open a gallery with the first bundle that has its backbone. Raises ValueError if there is
    none."""
    from serving.galleries.format import has_features_of, read_info
    from serving.galleries.gallery import Gallery

    info = read_info(folder)
    matching = [one for one in bundles if has_features_of(one, info)]
    return Gallery(folder, (matching or bundles)[0])


def route_paths() -> RoutePaths:
    """Return the paths for which HAProxy has rules."""
    from serving.http.app import ROUTERS
    from serving.http.routing import of_every_model, paths_of

    return RoutePaths(
        streams=of_every_model(paths_of(ROUTERS, lambda route: route.streams)),
        idempotent=of_every_model(paths_of(ROUTERS, lambda route: route.is_idempotent)),
    )


if __name__ == "__main__":
    main()
