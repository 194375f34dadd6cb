"""A run's folder: the paths of its files, its lock and its recipe."""

import fcntl
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data.files import commit
from data.retry import TransientError, retried
from trainer.config import Recipe
from trainer.recipe import STORED_NAME, dump_recipe, load_recipe

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. A process that trains in it holds its lock."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / STORED_NAME

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @contextmanager
    def locked(self, *, wait_seconds: float = 0) -> Iterator[None]:
        """Lock the folder for this process.

        Raises TransientError if another process still holds the lock after `wait_seconds`, and
        OSError if the folder cannot be created or written.
        """
        try:
            retried(str(self.path), lambda: self.path.mkdir(parents=True, exist_ok=True))
            lock = retried(str(self._lock), lambda: self._lock.open("w"))
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                f"run is {self.path}, which cannot be created or written to ({reason}): "
                "choose another folder with run=FOLDER"
            ) from error
        with lock as file:
            self._claim(file, wait_seconds)
            yield

    def is_locked(self) -> bool:
        """Return whether a process is training in the folder."""
        try:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is no lock file, or the file system has no locks
            return False
        return False

    @property
    def _lock(self) -> Path:
        return self.path / ".lock"

    def _claim(self, lock: IO[str], wait_seconds: float) -> None:
        deadline, is_waiting = time.monotonic() + wait_seconds, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                in_use = f"run {self.path} is being trained by another process"
                if time.monotonic() >= deadline:
                    raise TransientError(
                        f"{in_use}: wait for that process, stop it, or choose another run folder"
                    ) from None
            if not is_waiting:
                print(f"{in_use}: waiting for up to {wait_seconds:.0f} s", flush=True)
                is_waiting = True
            time.sleep(_POLL_SECONDS)

    def load_recipe(
        self, overrides: Sequence[str] = (), *, allow_imports: Collection[str] = ()
    ) -> Recipe:
        """Return the resolved recipe of a run. Only import paths in `allow_imports` are imported.

        Raises FileNotFoundError if the folder is not a run.
        """
        if not self.recipe.is_file():
            raise FileNotFoundError(
                f"{self.path} is not a run: {self.recipe.name} is missing. Pass the folder in the "
                "`run` key of the recipe"
            )
        return load_recipe(self.recipe, overrides, allow_imports=allow_imports, is_trusted=False)

    def write(self, recipe: Recipe) -> None:
        """Store the resolved recipe in the folder."""
        retried(str(self.path), lambda: self.path.mkdir(parents=True, exist_ok=True))
        commit(self.recipe, dump_recipe(recipe).encode())


def flat_settings(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys. A list counts as a leaf."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    items = ((f"{prefix}.{key}" if prefix else key, value) for key, value in tree.items())
    return {path: leaf for key, value in items for path, leaf in flat_settings(value, key).items()}
