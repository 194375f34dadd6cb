"""The bundles and galleries on disk: which one is published at a path, and which was served last.

A path is published atomically: it is a symbolic link that is replaced, or a folder that is renamed
to it. `kway export`, `kway calibrate` and `kway index` do the latter.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from data.files import commit
from serving.config import ServingConfig

_MOST_KILLED = 3


def paths_of_models(bundle: Path, config: ServingConfig) -> dict[str, Path]:
    """Return the paths of the bundles by the names of the models, the default model first. Raises
    ValueError if two models have the same name."""
    name = Path(os.path.abspath(bundle)).name
    if name in config.models:
        raise ValueError(
            f"--model {name}={config.models[name]} has the name of the folder {bundle}, which is "
            "the default model. Use another name"
        )
    return {name: bundle, **config.models}


class LastServed(BaseModel):
    """The version that a server has served last, and the folder from which it was loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    version: str


class LastServedFiles:
    """A file for each model in the state folder, `served-NAME.json`.

    A replica that starts while the published bundle is damaged serves the last version instead. On
    a Ray cluster, there is no state folder, and nothing is stored.
    """

    def __init__(self, state: Path | None) -> None:
        self._state = state

    def read(self, name: str) -> LastServed | None:
        if self._state is None:
            return None
        try:
            return LastServed.model_validate_json(self._file(self._state, name).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, name: str, served: LastServed) -> None:
        if self._state is not None and self.read(name) != served:
            commit(self._file(self._state, name), served.model_dump_json().encode() + b"\n")

    def _file(self, state: Path, name: str) -> Path:
        return state / f"served-{name}.json"


class Attempts:
    """The attempts of a server's replicas to load new versions, one at a time. A replica that runs
    out of memory in an attempt is killed; after `_MOST_KILLED` such attempts, the version is
    rejected.

    A file in the state folder, `loading-NAME`, contains a line with the version for each attempt
    that has not ended. On a Ray cluster, there is no state folder, and attempts are not counted.
    """

    def __init__(self, state: Path | None) -> None:
        self._state = state

    @contextmanager
    def attempt(self, name: str, version: str) -> Iterator[None]:
        """Wait until no other replica is loading a version of the model `name`, and count an
        attempt. Raises ValueError if too many replicas were killed while they loaded this
        version."""
        if self._state is None:
            yield
            return
        with (self._state / f"loading-{name}").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            killed = file.read().split().count(version)
            if killed >= _MOST_KILLED:
                raise ValueError(
                    f"{killed} replicas were killed while they loaded version {version}, perhaps "
                    "because memory was exhausted: add memory and reload, or publish another "
                    "version"
                )
            file.write(f"{version}\n")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def forget(self, name: str) -> None:
        """Allow all versions to be loaded again."""
        if self._state is not None:
            with suppress(FileNotFoundError):
                os.truncate(self._state / f"loading-{name}", 0)
