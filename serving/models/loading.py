"""Load and check a version of the model: its bundle and its galleries.

A path is published atomically: it is a symbolic link that is replaced, or a folder that is renamed
to it. `kway export`, `kway calibrate` and `kway index` do the latter.
"""

import os
from pathlib import Path

from serving.config import ServingConfig
from serving.galleries.format import GALLERY
from serving.galleries.searching import Galleries
from serving.model import Model
from serving.models.served import Version
from serving.service import Counts, Service, Shared
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import SPEC, read_manifest

# Changes whenever another bundle or gallery is published.
Fingerprint = tuple[tuple[str, int, int], ...]


class Loader:
    """Loads versions of the model from the path of a bundle."""

    def __init__(self, bundle: Path, config: ServingConfig, counts: Counts) -> None:
        self._path, self._config = Path(os.path.abspath(bundle)), config
        self._shared = Shared(config, counts)

    def first(self) -> Version:
        """Load what is published. Raises OSError or ValueError if it cannot be served.

        Each replica would read all class weights, so only `kway serve --verify` verifies their
        checksum.
        """
        service = self._service(Path(os.path.realpath(self._path)), class_weights=False)
        return Version(service, Galleries(self._config.galleries, service.model.bundle))

    def fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint of what is published, None if the bundle does not exist, as while
        it is being replaced."""
        of_bundle = _stamp(self._path / SPEC)
        if of_bundle is None:
            return None
        galleries = self._config.galleries.values()
        return of_bundle, *(_stamp(gallery / GALLERY) or ("", 0, 0) for gallery in galleries)

    def successor(self, current: Version) -> Version:
        """Load and check what is published. Returns `current` if nothing has changed.

        The checksums of all new files are verified. Raises OSError or ValueError if the bundle or a
        gallery is damaged or incomplete, if the bundle fails its self-check or reads another kind
        of input, or if a gallery has features of another backbone.
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
        galleries = Galleries(self._config.galleries, service.model.bundle)
        before_of = current.galleries
        changed = [
            name for name in galleries.names() if galleries[name].info != before_of[name].info
        ]
        for name in changed:
            galleries[name].verify()
        if service is current.service and not changed:
            return current
        return Version(service, galleries)

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
