"""Load and check a version of a model: its bundle and its galleries."""

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from serving.config import ServingConfig
from serving.galleries.format import GALLERY, has_features_of, read_info
from serving.galleries.searching import Galleries
from serving.model import Model
from serving.models.models import Models, ServedModel, Version
from serving.models.published import Attempts, LastServed, LastServedFiles
from serving.service import Counts, Service, Shared
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import SPEC, read_manifest

_log = logging.getLogger("kway.models")
# Changes whenever another bundle or gallery is published.
Fingerprint = tuple[tuple[str, int, int], ...]


class Loader:
    """Loads versions of the models of a replica from `paths`, by name."""

    def __init__(self, paths: Mapping[str, Path], config: ServingConfig, counts: Counts) -> None:
        self.paths, self._config = paths, config
        self._shared = Shared(config, counts)
        self._last, self.attempts = LastServedFiles(config.state), Attempts(config.state)

    def open_all(self) -> Models:
        """Open all models. Raises OSError or ValueError if one of them cannot be served, or if a
        gallery belongs to none of them."""
        models = Models([ServedModel(name, self._first(name)) for name in self.paths])
        offered = {name for model in models for name in model.current.galleries.names()}
        for name, folder in self._config.galleries.items():
            if name not in offered:
                # Raises an error that describes the difference.
                bundle = models.default.current.service.model.bundle
                Galleries({name: folder}, bundle)
        return models

    def fingerprint(self, name: str) -> Fingerprint | None:
        """Return the fingerprint of what is published for the model `name`, None if it does not
        exist."""
        return _fingerprint(self.paths[name], self._config.galleries.values())

    def successor(self, name: str, current: Version) -> Version:
        """Load and check what is published for the model `name`. Returns `current` if nothing has
        changed.

        The checksums of all new files are verified. Raises OSError or ValueError if the bundle or a
        gallery is damaged or incomplete, if the bundle fails its self-check or reads another kind
        of input, or if a gallery that is served now has features of another backbone.
        """
        # Resolve symbolic links only once, so that all files are of one version.
        folder = Path(os.path.realpath(self.paths[name]))
        service = current.service
        if read_manifest(folder).version != current.id:
            service = self._service(name, folder, None)
            before, after = current.service.model.reads, service.model.reads
            if after != before:
                raise ValueError(
                    f"{folder} reads {after}, but the model reads {before}. Serve it as another "
                    "model with --model NAME=FOLDER"
                )
        galleries = self._galleries(service.model.bundle, current.galleries.names())
        changed = [one for one in galleries.names() if not _is_same(one, galleries, current)]
        for one in changed:
            galleries[one].verify()
        if service is current.service and not changed:
            return current
        return Version(service, galleries)

    def remember(self, name: str, version: Version) -> None:
        """Store that this version is served. If this fails, the error is logged."""
        folder = version.service.model.bundle.path
        try:
            self._last.write(name, LastServed(folder=folder, version=version.id))
        except OSError as error:
            _log.error("model %s: the version that is served cannot be stored (%s)", name, error)

    def _first(self, name: str) -> Version:
        """Load what is published or, if it is damaged, the version that was served last."""
        last, folder = self._last.read(name), Path(os.path.realpath(self.paths[name]))
        try:
            # On a Ray cluster, nothing is recorded. Each replica would read all class weights.
            has_record = last is not None
            service = self._service(name, folder, last, class_weights=has_record)
        except (OSError, ValueError) as error:
            service = self._last_service(name, last, error)
        required = self._config.galleries if len(self.paths) == 1 else ()
        return Version(service, self._galleries(service.model.bundle, required))

    def _last_service(self, name: str, last: LastServed | None, error: Exception) -> Service:
        if last is None:
            raise error
        try:
            service = self._service(name, last.folder, last)
        except (OSError, ValueError):
            raise error from None
        if service.version != last.version:
            raise error
        _log.error("model %s: %s. Version %s is served instead", name, error, service.version)
        return service

    def _service(
        self, name: str, folder: Path, last: LastServed | None, *, class_weights: bool = True
    ) -> Service:
        """Load a bundle and verify its checksums. Those of the version that was served last have
        been verified before."""
        bundle = Bundle.open(folder)
        if last is not None and bundle.version == last.version:
            return self._loaded(name, bundle)
        with self.attempts.attempt(name, bundle.version):
            bundle.verify(class_weights=class_weights)
            return self._loaded(name, bundle)

    def _loaded(self, name: str, bundle: Bundle) -> Service:
        config = self._config
        model = Model(
            bundle,
            max_pixels=config.max_pixels,
            device=config.device,
            allow_imports=config.allow_imports,
        )
        return Service(model, self._shared, name=name)

    def _galleries(self, bundle: Bundle, required: Collection[str]) -> Galleries:
        """Open the galleries of a bundle: all `required` ones, and those with its backbone."""
        folders = {
            name: folder
            for name, folder in self._config.galleries.items()
            if name in required or has_features_of(bundle, read_info(folder))
        }
        return Galleries(folders, bundle)


def _fingerprint(bundle: Path, galleries: Iterable[Path]) -> Fingerprint | None:
    """Return the fingerprint of a bundle and its galleries, None if the bundle does not exist, as
    while it is being replaced."""
    of_bundle = _stamp(bundle / SPEC)
    if of_bundle is None:
        return None
    of_galleries = [_stamp(gallery / GALLERY) or ("", 0, 0) for gallery in galleries]
    return of_bundle, *of_galleries


def _stamp(file: Path) -> tuple[str, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return os.path.realpath(file), status.st_ino, status.st_mtime_ns


def _is_same(name: str, galleries: Galleries, current: Version) -> bool:
    before = current.galleries
    return name in before.names() and before[name].info == galleries[name].info
