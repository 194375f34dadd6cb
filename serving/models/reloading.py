"""Replace the version of a replica's model while it answers requests.

A thread checks the paths of the bundle and the galleries every second. If another version has been
published, the thread loads and checks it, and then replaces the current version. A version that
cannot be served is reported once, and the current one continues to serve.
"""

import gc
import logging
import threading
import time
import weakref
from typing import Literal, Protocol

from serving.models.loading import Fingerprint, Loader
from serving.models.served import ServedModel, Version
from serving.service import Service

_POLL_SECONDS = 1.0
# A damaged version is loaded again after this time, because it may be complete by then.
_RETRY_SECONDS = 10.0
_log = logging.getLogger("kway.models")
_log.setLevel(logging.INFO)  # `kway serve` prints when the model switches to another version

Outcome = Literal["switched", "failed"]


class ReloadCounts(Protocol):
    """Counts reloads."""

    def count_reload(self, model: str, outcome: Outcome) -> None: ...


class Reloader:
    """Opens the model of a replica and replaces its version. Use it from a single thread at a
    time."""

    def __init__(self, loader: Loader, counts: ReloadCounts) -> None:
        """Raises the same exceptions as `Loader.first`."""
        self._loader, self._counts = loader, counts
        self.model = ServedModel(loader.first())
        self._replaced: list[weakref.ref[Service]] = []
        # What has been loaded from the paths, when, and why it cannot be served.
        self._fingerprint: Fingerprint | None = None
        self._tried_at, self._error = 0.0, ""

    def start(self) -> None:
        """Start the thread that checks the paths."""
        threading.Thread(target=self._poll_forever, name="reload", daemon=True).start()

    def poll(self) -> None:
        """Load what has been published since the last call, and free replaced versions."""
        found = self._loader.fingerprint()
        is_retry = self._error and time.monotonic() - self._tried_at > _RETRY_SECONDS
        # While it is being replaced, the path may not exist.
        if found is not None and (found != self._fingerprint or is_retry):
            self._reload()
        self._free()

    def _poll_forever(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                self.poll()
            except Exception:  # the thread must continue
                _log.exception("the published bundle cannot be checked")

    def _reload(self) -> None:
        model, previous = self.model, self.model.current
        try:
            model.current = self._published()
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            model.is_rejected = True
            text = f"model {model.name}: {error}. Version {previous.id} continues to serve"
            if text != self._error:
                self._error = text
                _log.error("%s", text)
                self._counts.count_reload(model.name, "failed")
            return
        model.is_rejected, self._error = False, ""
        if model.current is not previous:
            if model.current.service is not previous.service:
                self._replaced.append(weakref.ref(previous.service))
            _log.info("model %s: version %s is served now", model.name, model.current.id)
            self._counts.count_reload(model.name, "switched")

    def _published(self) -> Version:
        """Load what is published. If it is replaced in the meantime, load it again."""
        while True:
            found = self._loader.fingerprint()
            self._fingerprint, self._tried_at = found, time.monotonic()
            try:
                version = self._loader.successor(self.model.current)
            except (OSError, ValueError):
                if self._loader.fingerprint() == found:
                    raise
            else:
                if self._loader.fingerprint() == found:
                    return version

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
