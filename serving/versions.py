"""The versions of a replica's model: load what is published at the path of the bundle, and replace
the current version with it while the replica answers requests. The same applies to galleries and to
the file of thresholds.

A path is published atomically: it is a symbolic link that is replaced, or a folder that is renamed
to it. `kway export`, `kway calibrate` and `kway index` do the latter. A thread checks the paths
every second. If another version has been published, the thread loads and checks it, and then
replaces the current version. A version that cannot be served is reported once, and the current one
continues to serve.

A request takes the current version once, when it starts, and uses nothing else. So an answer never
mixes two versions, and an old version is freed when its last request has ended.
"""

import gc
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from serving.config import ServingConfig
from serving.galleries.gallery import GALLERY
from serving.galleries.searching import Galleries
from serving.metrics import Metrics
from serving.model import Model
from serving.overrides import read_overrides
from serving.service import Service, Shared
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import SPEC, read_manifest

# Changes whenever another bundle, gallery or file of thresholds is published.
Fingerprint = tuple[tuple[str, int, int], ...]

_POLL_SECONDS = 1.0
# A damaged version is loaded again after this time, because it may be complete by then.
_RETRY_SECONDS = 10.0
_log = logging.getLogger("kway.models")


@dataclass(frozen=True)
class Version:
    """A bundle that is loaded, and the galleries that are searched with it."""

    service: Service
    galleries: Galleries


class ServedModel:
    """The model of a replica. `current` is its version, which `poll` replaces. `is_rejected` is
    true while a version that cannot be served is published."""

    def __init__(self, bundle: Path, config: ServingConfig, metrics: Metrics) -> None:
        """Load what is published. Raises OSError or ValueError if the bundle cannot be served.

        Each replica would read all class weights, so only `kway serve --verify` verifies their
        checksum.
        """
        self._path, self._config = Path(os.path.abspath(bundle)), config
        self._metrics, self._shared = metrics, Shared(config, metrics)
        self.name, self.is_rejected = self._path.name, False
        self.current = self._load(None)
        self._replaced: list[weakref.ref[Service]] = []
        # What has been loaded from the paths, when, and why it cannot be served.
        self._loaded: Fingerprint | None = None
        self._tried_at, self._error = 0.0, ""

    def start(self) -> None:
        """Start the thread that checks the paths and reports the state of the replica."""
        threading.Thread(target=self._poll_forever, name="reload", daemon=True).start()

    def poll(self) -> None:
        """Load what has been published since the last call, and free replaced versions. Use it from
        a single thread."""
        found = self._fingerprint()
        is_retry = self._error and time.monotonic() - self._tried_at > _RETRY_SECONDS
        # The path may be missing while a version is being replaced.
        if found is not None and (found != self._loaded or is_retry):
            self._reload(found)
        # Reference counting frees a replaced version whose last request has ended, except for its
        # reference cycles.
        in_use = [ref for ref in self._replaced if ref() is not None]
        if len(in_use) < len(self._replaced):
            gc.collect()
        self._replaced = in_use

    def _poll_forever(self) -> None:
        while True:
            service = self.current.service
            num_requests, num_queued = service.load()
            self._metrics.report(
                self.name,
                service.model.bundle,
                is_rejected=self.is_rejected,
                requests=num_requests,
                queued_inputs=num_queued,
            )
            time.sleep(_POLL_SECONDS)
            try:
                self.poll()
            except Exception:  # the thread must continue
                _log.exception("the published bundle cannot be checked")

    def _reload(self, found: Fingerprint) -> None:
        """Load what is published. `found` is its fingerprint: if it is replaced in the meantime,
        the next call of `poll` loads it again."""
        previous, self._tried_at = self.current, time.monotonic()
        try:
            self.current = self._load(previous)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            if self._fingerprint() != found:  # its files may be of two versions
                return
            self.is_rejected = True
            old = previous.service.version
            text = f"model {self.name}: {error}. Version {old} continues to serve"
            if text != self._error:
                self._error = text
                _log.error("%s", text)
                self._metrics.count_reload(self.name, "failed")
            return
        finally:
            self._loaded = found
        self.is_rejected, self._error = False, ""
        if self.current is not previous:
            if self.current.service is not previous.service:
                self._replaced.append(weakref.ref(previous.service))
            _log.info("model %s: version %s is served now", self.name, self.current.service.version)
            self._metrics.count_reload(self.name, "switched")

    def _load(self, previous: Version | None) -> Version:
        """Load and check what is published. Returns `previous` if nothing has changed.

        The checksums of all files that replace those of `previous` are verified. Raises OSError or
        ValueError if the bundle or a gallery is damaged or incomplete, if the file of thresholds is
        invalid, or if the bundle fails its self-check or reads another kind of input. A gallery
        whose features come from another backbone than the new bundle's becomes unavailable.
        """
        config = self._config
        # Resolve symbolic links only once, so that all files are of one version.
        folder = Path(os.path.realpath(self._path))
        if previous is not None and read_manifest(folder).version == previous.service.version:
            model = previous.service.model
        else:
            bundle = Bundle.open(folder)
            bundle.verify(class_weights=previous is not None)
            model = Model(
                bundle,
                max_pixels=config.max_pixels,
                device=config.device,
                allow_imports=config.allow_imports,
            )
        file = config.thresholds
        overrides = {} if file is None else read_overrides(file, model.bundle)
        galleries = Galleries(config.galleries, model.bundle)
        if previous is not None:
            old = previous.service
            if model.reads != old.model.reads:
                raise ValueError(
                    f"{folder} reads {model.reads}, but the model reads {old.model.reads}. Serve "
                    "it with another server"
                )
            is_changed = galleries.verify(previous.galleries, is_new=model is not old.model)
            if model is old.model and overrides == old.overrides:
                return Version(old, galleries) if is_changed else previous
        if overrides:
            _log.info("model %s: %d thresholds are overridden", self.name, len(overrides))
        for name, error in galleries.unavailable.items():
            _log.error("gallery %s is unavailable: %s", name, error)
        return Version(Service(model, self._shared, overrides, name=self.name), galleries)

    def _fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint of what is published, or None if there is no bundle, for example
        while it is being replaced."""
        of_bundle = _stamp(self._path / SPEC)
        if of_bundle is None:
            return None
        files = [gallery / GALLERY for gallery in self._config.galleries.values()]
        if self._config.thresholds is not None:
            files.append(self._config.thresholds)
        return of_bundle, *(_stamp(file) or ("", 0, 0) for file in files)


def _stamp(file: Path) -> tuple[str, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return os.path.realpath(file), status.st_ino, status.st_mtime_ns
