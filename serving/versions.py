"""The versions of a replica's model: load what is published at the path of the bundle, and replace
the current version by another one while the replica answers requests. The same applies to
galleries and to the file of thresholds.

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
from serving.galleries.format import GALLERY, OtherBackboneError
from serving.galleries.searching import Galleries
from serving.metrics import Metrics, ReplicaState
from serving.model import Model
from serving.overrides import read_overrides
from serving.service import Service, Shared
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import SPEC, read_manifest

# Changes whenever another bundle or gallery is published.
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

    @property
    def id(self) -> str:
        return self.service.version


class ServedModel:
    """The model of a replica. `current` may be replaced from any thread. `is_rejected` is true
    while a version that cannot be served is published."""

    def __init__(self, current: Version) -> None:
        self.name, self.current, self.is_rejected = current.service.name, current, False

    @classmethod
    def of(cls, service: Service) -> "ServedModel":
        """Return a model with the galleries of its configuration."""
        galleries = Galleries(service.config.galleries, service.model.bundle)
        return cls(Version(service, galleries))

    def check_health(self) -> None:
        """Raise RuntimeError if a forward pass has hung."""
        self.current.service.check_health()

    def state(self) -> ReplicaState:
        """Can be called from any thread."""
        service = self.current.service
        return ReplicaState(
            service.name,
            service.version,
            service.model.bundle.spec.loss,
            self.is_rejected,
            *service.load(),
        )


class Loader:
    """Loads versions of the model from the path of a bundle."""

    def __init__(self, bundle: Path, config: ServingConfig, metrics: Metrics) -> None:
        self._path, self._config = Path(os.path.abspath(bundle)), config
        self._shared = Shared(config, metrics)

    def first(self) -> Version:
        """Load what is published. Raises OSError or ValueError if the bundle cannot be served.

        Each replica would read all class weights, so only `kway serve --verify` verifies their
        checksum.
        """
        service = self._service(Path(os.path.realpath(self._path)), class_weights=False)
        self._apply(service, self._overrides(service))
        return Version(service, self._galleries(service))

    def fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint of what is published, None if the bundle does not exist, as while
        it is being replaced."""
        of_bundle = _stamp(self._path / SPEC)
        if of_bundle is None:
            return None
        files = [gallery / GALLERY for gallery in self._config.galleries.values()]
        if self._config.thresholds is not None:
            files.append(self._config.thresholds)
        return of_bundle, *(_stamp(file) or ("", 0, 0) for file in files)

    def successor(self, current: Version) -> Version:
        """Load and check what is published. Returns `current` if nothing has changed.

        The checksums of all new files are verified. Raises OSError or ValueError if the bundle or a
        gallery is damaged or incomplete, if the file of thresholds is invalid, or if the bundle
        fails its self-check or reads another kind of input. Galleries with features of another
        backbone than a new bundle's become unavailable.
        """
        # Resolve symbolic links only once, so that all files are of one version.
        folder = Path(os.path.realpath(self._path))
        service = current.service
        if read_manifest(folder).version != current.id:
            service = self._service(folder, class_weights=True)
            before, after = current.service.model.reads, service.model.reads
            if after != before:
                raise ValueError(
                    f"{folder} reads {after}, but the model reads {before}. Serve it with another "
                    "server"
                )
        overrides = self._overrides(service)
        is_same, previous = service is current.service, current.galleries
        galleries = self._galleries(service, log=not is_same)
        for name, error in galleries.unavailable.items():
            if name in previous and (is_same or not isinstance(error, OtherBackboneError)):
                raise error
        available = [name for name in galleries.names() if name in galleries]
        changed = [
            name
            for name in available
            if name not in previous or galleries[name].info != previous[name].info
        ]
        for name in changed:
            galleries[name].verify()
        self._apply(service, overrides)
        return current if is_same and not changed else Version(service, galleries)

    def _galleries(self, service: Service, *, log: bool = True) -> Galleries:
        galleries = Galleries(self._config.galleries, service.model.bundle)
        if log:
            for name, error in galleries.unavailable.items():
                _log.error("gallery %s is unavailable: %s", name, error)
        return galleries

    def _overrides(self, service: Service) -> dict[int, float]:
        file = self._config.thresholds
        return {} if file is None else read_overrides(file, service.model.bundle)

    def _apply(self, service: Service, overrides: dict[int, float]) -> None:
        if overrides != service.overrides:
            _log.info(
                "model %s: the thresholds of %d classes are overridden",
                service.name,
                len(overrides),
            )
            service.overrides = overrides

    def _service(self, folder: Path, *, class_weights: bool) -> Service:
        """Load a bundle and verify its checksums."""
        bundle, config = Bundle.open(folder), self._config
        bundle.verify(class_weights=class_weights)
        model = Model(
            bundle,
            max_pixels=config.max_pixels,
            device=config.device,
            allow_imports=config.allow_imports,
        )
        return Service(model, self._shared, name=self._path.name)


def _stamp(file: Path) -> tuple[str, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return os.path.realpath(file), status.st_ino, status.st_mtime_ns


class Reloader:
    """Opens the model of a replica and replaces its version. Use it from a single thread at a
    time."""

    def __init__(self, loader: Loader, metrics: Metrics) -> None:
        """Raises the same exceptions as `Loader.first`."""
        self._loader, self._metrics = loader, metrics
        self.model = ServedModel(loader.first())
        self._replaced: list[weakref.ref[Service]] = []
        # What has been loaded from the paths, when, and why it cannot be served.
        self._fingerprint: Fingerprint | None = None
        self._tried_at, self._error = 0.0, ""

    def start(self) -> None:
        """Start the thread that checks the paths and reports the state of the replica."""
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
            self._metrics.report(self.model.state())
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
                self._metrics.count_reload(model.name, "failed")
            return
        model.is_rejected, self._error = False, ""
        if model.current is not previous:
            if model.current.service is not previous.service:
                self._replaced.append(weakref.ref(previous.service))
            _log.info("model %s: version %s is served now", model.name, model.current.id)
            self._metrics.count_reload(model.name, "switched")

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
