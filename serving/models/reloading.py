"""Replace the versions of a replica's models while it answers requests.

A thread checks the paths of the bundles and galleries every second. If another version has been
published, the thread loads and checks it, and then replaces the current version. A version that
cannot be served is reported once, and the current one continues to serve.
"""

import gc
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Literal, Protocol

from serving.models.loading import Fingerprint, Loader
from serving.models.models import Models, ServedModel, Version
from serving.schemas import Reloaded
from serving.service import Service

_POLL_SECONDS = 1.0
# A damaged version is loaded again after this time, because it may be complete by then.
_RETRY_SECONDS = 10.0
_log = logging.getLogger("kway.models")
_log.setLevel(logging.INFO)  # `kway serve` prints when a model switches to another version

Outcome = Literal["switched", "unchanged", "failed"]


class ReloadError(ValueError):
    """A published version cannot be served."""


class ReloadCounts(Protocol):
    """Counts reloads."""

    def count_reload(self, model: str, outcome: Outcome) -> None: ...


@dataclass
class _Seen:
    """What has been loaded from the path of a model, or why it could not be loaded."""

    fingerprint: Fingerprint | None = None
    error: str | None = None
    tried_at: float = 0.0

    def is_due(self, found: Fingerprint) -> bool:
        is_retry = self.error is not None and time.monotonic() - self.tried_at > _RETRY_SECONDS
        return found != self.fingerprint or is_retry


class Reloader:
    """Opens the models of a replica and replaces their versions. Models are loaded one at a time.
    Thread-safe."""

    def __init__(self, loader: Loader, counts: ReloadCounts) -> None:
        """Raises the same exceptions as `Loader.open_all`."""
        self._loader, self._counts = loader, counts
        self._lock = threading.Lock()
        self.models: Models = loader.open_all()
        self._seen = {model.name: _Seen() for model in self.models}
        self._replaced: list[weakref.ref[Service]] = []
        for model in self.models:
            loader.remember(model.name, model.current)

    def start(self) -> None:
        """Start the thread that checks the paths."""
        threading.Thread(target=self._poll_forever, name="reload", daemon=True).start()

    def reload(self) -> list[Reloaded]:
        """Load what is published for each model now, and return the results. Blocks.

        Raises ReloadError if a model keeps its version because the published one cannot be served.
        All models are tried.
        """
        with self._lock:
            for name, seen in self._seen.items():
                seen.error = None  # report it again
                self._loader.attempts.forget(name)
            results = [self._reloaded(model) for model in self.models]
        if errors := [result for result in results if isinstance(result, str)]:
            raise ReloadError("; ".join(errors))
        return [result for result in results if isinstance(result, Reloaded)]

    def poll(self) -> None:
        """Load what has been published since the last call, and free replaced versions."""
        with self._lock:
            for model in self.models:
                found = self._loader.fingerprint(model.name)
                # While it is being replaced, the path may not exist.
                if found is not None and self._seen[model.name].is_due(found):
                    self._reloaded(model)
            self._free()

    def _poll_forever(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                self.poll()
            except Exception:  # the thread must continue
                _log.exception("the published bundles cannot be checked")

    def _reloaded(self, model: ServedModel) -> Reloaded | str:
        """Replace the version of `model` if another one is published. Returns the result or an
        error."""
        previous = model.current
        try:
            model.current = self._published(model)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            model.is_rejected = True
            return self._failed(model, error)
        model.is_rejected = False
        if model.current is previous:
            outcome: Outcome = "unchanged"
        else:
            outcome = "switched"
            self._loader.remember(model.name, model.current)
            if model.current.service is not previous.service:
                self._replaced.append(weakref.ref(previous.service))
            _log.info("model %s: version %s is served now", model.name, model.current.id)
            self._counts.count_reload(model.name, outcome)
        return Reloaded(
            name=model.name, version=model.current.id, previous=previous.id, outcome=outcome
        )

    def _published(self, model: ServedModel) -> Version:
        """Load what is published for `model`. If it is replaced in the meantime, load it again."""
        seen = self._seen[model.name]
        while True:
            found = self._loader.fingerprint(model.name)
            seen.fingerprint, seen.tried_at = found, time.monotonic()
            try:
                version = self._loader.successor(model.name, model.current)
            except (OSError, ValueError):
                if self._loader.fingerprint(model.name) == found:
                    raise
            else:
                if self._loader.fingerprint(model.name) == found:
                    seen.error = None
                    return version

    def _failed(self, model: ServedModel, error: Exception) -> str:
        seen = self._seen[model.name]
        text = f"model {model.name}: {error}. Version {model.current.id} continues to serve"
        if seen.error != text:
            seen.error = text
            _log.error("%s", text)
            self._counts.count_reload(model.name, "failed")
        return text

    def _free(self) -> None:
        """Free the memory of replaced versions whose last request has ended.

        Reference counting frees a version except for the cycles inside of it. The garbage
        collector does not see them in objects that `gc.freeze` has excluded.
        """
        in_use = [ref for ref in self._replaced if ref() is not None]
        if len(in_use) < len(self._replaced):
            is_frozen = gc.get_freeze_count() > 0
            gc.unfreeze()
            gc.collect()
            if is_frozen:
                gc.freeze()
        self._replaced = in_use
