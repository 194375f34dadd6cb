"""A run's folder: the paths of its files, its recipe, and a check of whether a recipe may continue
the run.
"""

import fcntl
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from data.files import commit
from data.retry import TransientError, retried
from trainer.checkpoints import committed_folders
from trainer.config import Recipe
from trainer.imports import at_key, import_paths, setting_of, with_component
from trainer.recipe import STORED_NAME, build_recipe, dump_recipe, load_stored_recipe, read_recipe

# Settings that must not change within a run: with a new value, training would not be a continuation
# of the earlier steps. Settings under _FREE may change.
_FIXED = ("seed", "data", "backbone", "head", "optimizer.kind", "train.global_batch")
_FREE = (
    "data.workers",
    "data.cache",
    "data.eval_split",
    "head.memory_mib",
    "head.min_init_share",
)


_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RunFolder:
    """A run's folder: its paths, its lock and its recipe."""

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
        with self._writable():
            retried(str(self.path), lambda: self.path.mkdir(parents=True, exist_ok=True))
            lock = retried(str(self._lock), lambda: self._lock.open("w"))
        with lock as file:
            self._claim(file, fcntl.LOCK_EX, wait_seconds)
            yield

    def check_writable(self) -> None:
        """Raise the errors of `locked`, and OSError if no checkpoint can be written.

        Does not leave files behind. All ranks may call it at the same time.
        """
        with self._writable():
            for folder in (self.path, self.checkpoints):
                existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
                with TemporaryFile(dir=existing) as file:
                    file.write(b"kway")
            lock = self._lock.open("r+") if self._lock.exists() else None
        if lock is not None:
            with lock as file:
                self._claim(file, fcntl.LOCK_SH)

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

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                f"run is {self.path}, which cannot be created or written to ({reason}): "
                "choose another folder with run=FOLDER"
            ) from error

    def _claim(self, lock: IO[str], mode: int, wait_seconds: float = 0) -> None:
        deadline, is_waiting = time.monotonic() + wait_seconds, False
        while True:
            try:
                fcntl.flock(lock, mode | fcntl.LOCK_NB)
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
        return load_stored_recipe(self.recipe, overrides, allow_imports=allow_imports)

    def check(self, recipe: Recipe) -> None:
        """Check that a recipe may continue the run in this folder.

        Raises ValueError if the folder contains checkpoints of a recipe with different fixed
        settings, or if it contains any checkpoint but the recipe sets `resume: never`.
        """
        if committed_folders(self.checkpoints):
            if recipe.resume == "never":
                raise ValueError(
                    f"run {self.path} contains checkpoints, but resume=never is set: choose "
                    "another run folder, or set resume=auto to continue the run"
                )
            changed = _differences(self._stored_settings(recipe), settings_of(recipe))
            if changed:
                raise ValueError(
                    f"run {self.path} was started with different values of {', '.join(changed)}: "
                    "undo the change or choose another run folder"
                )

    def _stored_settings(self, recipe: Recipe) -> dict[str, Any]:
        """Return the settings of the stored recipe. An imported component that `recipe` does not
        use is represented by its kind alone, because validating its options would import it."""
        tree, trusted = read_recipe(self.recipe), import_paths(recipe)
        stored_paths = import_paths(tree).items()
        others = {setting_of(key): path for key, path in stored_paths if trusted.get(key) != path}
        for key in others:
            tree = with_component(tree, key, at_key(recipe, key))
        stored = build_recipe(tree, origin=f"recipe {self.recipe}", allow_imports=trusted.values())
        known = {k: value for k, value in settings_of(stored).items() if not _under(k, others)}
        return known | {f"{key}.kind": path for key, path in others.items()}

    def write(self, recipe: Recipe) -> None:
        """Store the resolved recipe in the folder."""
        retried(str(self.path), lambda: self.path.mkdir(parents=True, exist_ok=True))
        commit(self.recipe, dump_recipe(recipe).encode())


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = {
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key) and _under(key, _FIXED) and not _under(key, _FREE)
    }
    # If a kind differs, all of its settings differ too: report only the kind.
    kinds = {key.removesuffix(".kind") for key in changed if key.endswith(".kind")}
    named = sorted(key for key in changed if key.endswith(".kind") or not _under(key, kinds))
    if "data.mixture" in named:
        old, new = before.get("data.mixture", []), after.get("data.mixture", [])
        sets = [one for one in (*old, *new) if one not in old or one not in new]
        names = ", ".join(dict.fromkeys(f"{one['shards']} {one['split']}" for one in sets))
        named[named.index("data.mixture")] = f"data.mixture ({names or 'the order of the sets'})"
    return named


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return every setting of a recipe by its dotted key."""
    return flat_settings(recipe.model_dump(mode="json"))


def _under(key: str, prefixes: Iterable[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def flat_settings(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys. A list counts as a leaf."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    items = ((f"{prefix}.{key}" if prefix else key, value) for key, value in tree.items())
    return {path: leaf for key, value in items for path, leaf in flat_settings(value, key).items()}
