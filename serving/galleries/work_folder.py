"""The work folder of a gallery, `GALLERY.partial`. It is locked during a run, removed on success,
and kept after a failure so that the next run can resume.

about.json      settings of the gallery; a run resumes only if its own settings match
part-000/ …     results of each run, see `serving/galleries/rows.py`
listing.jsonl   all items of the collection
missing.jsonl   the items that this run must compute
gallery/        the finished gallery, before it is published
old/            the previous gallery, between the two renames of a publish
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from data.files import commit, explained
from serving.galleries.format import GALLERY, GalleryInfo, Sha256, read_info
from serving.galleries.rows import COMMITTED
from trainer.bundle.spec import Reads, Spec

_SUFFIX = ".partial"
_SETTINGS, _LOCK = "about.json", "lock"


class GallerySettings(Spec):
    """Settings that must match before a run can update a gallery or resume an earlier run."""

    reads: Reads
    backbone: Sha256
    dim: int
    thumbnails: bool
    source: str

    @classmethod
    def of(cls, info: GalleryInfo) -> "GallerySettings":
        return cls.model_validate(info.model_dump(include=set(cls.model_fields)))


class WorkFolder:
    """The paths and operations of a work folder. Use `work_folder` to create it."""

    def __init__(self, gallery: Path) -> None:
        self.gallery = Path(os.path.realpath(gallery))  # keep a symbolic link
        self.path = _work_path(self.gallery)
        self.listing, self.missing = self.path / "listing.jsonl", self.path / "missing.jsonl"
        self.unreadable = self.path / "unreadable.jsonl"
        self.finished, self._old = self.path / "gallery", self.path / "old"

    def indexed(self) -> list[Path]:
        """Return the folders that contain results of earlier runs: the parts and the gallery
        itself."""
        parts = [part for part in sorted(self.path.glob("part-*")) if (part / COMMITTED).is_file()]
        return [*parts, self.gallery] if (self.gallery / GALLERY).is_file() else parts

    def new_part(self) -> Path:
        """Return a path for the next part. The folder does not exist yet."""
        numbers = [int(part.name.removeprefix("part-")) for part in self.path.glob("part-*")]
        return self.path / f"part-{max(numbers, default=-1) + 1:03d}"

    def publish(self) -> None:
        """Replace the gallery with the finished one. If the process is killed between the two
        renames, the next run calls `recover`."""
        if self.gallery.exists():
            os.rename(self.gallery, self._old)
        os.rename(self.finished, self.gallery)
        # A rename is durable only once its folder is synced.
        folder = os.open(self.gallery.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard_empty_parts(self) -> None:
        """After a failure, keep only parts with results. Remove the work folder if there are no
        such parts."""
        for part in self.path.glob("part-*"):
            committed = part / COMMITTED
            if not (committed.is_file() and int(committed.read_bytes())):
                shutil.rmtree(part)
        if not any(self.path.glob("part-*")):
            shutil.rmtree(self.path)

    def recover(self) -> None:
        """Undo or complete an interrupted `publish`."""
        if self._old.exists() and not self.gallery.exists():
            os.rename(self._old, self.gallery)
        for folder in (self._old, self.finished):
            shutil.rmtree(folder, ignore_errors=True)

    def check_settings(self, settings: GallerySettings, *, force: bool) -> None:
        """Check that existing results have these settings, then record the settings. With `force`,
        a different source is accepted."""
        existing = [(self.path, _read_settings(self.path / _SETTINGS))]
        if (self.gallery / GALLERY).is_file():
            existing.append((self.gallery, GallerySettings.of(read_info(self.gallery))))
        elif self.gallery.exists():
            raise ValueError(f"{self.gallery} exists, but it is not a gallery: pass another path")
        for path, found in existing:
            if found is not None:
                _check_same(path, found, settings, force=force)
        commit(self.path / _SETTINGS, settings.model_dump_json(indent=1).encode())


@contextmanager
def work_folder(
    gallery: Path, settings: GallerySettings, *, force: bool = False
) -> Iterator[WorkFolder]:
    """Create and lock the work folder of `gallery`. The body of the `with` statement must publish
    the gallery unless the existing one is up to date. On success, the work folder is removed.

    If the body fails, its results are kept for the next run. Raises ValueError if another process
    is writing the gallery, or if existing results have different settings.
    """
    work = WorkFolder(gallery)
    is_new = not work.path.exists()
    work.path.mkdir(parents=True, exist_ok=True)
    with (work.path / _LOCK).open("ab") as lock, explained(work.path):
        _lock(lock.fileno(), work.path)
        work.recover()
        try:
            work.check_settings(settings, force=force)
        except ValueError:
            if is_new:
                shutil.rmtree(work.path)
            raise
        try:
            yield work
        except BaseException:
            work.discard_empty_parts()
            raise
        shutil.rmtree(work.path)


def _work_path(gallery: Path) -> Path:
    return gallery.with_name(gallery.name + _SUFFIX)


def _lock(descriptor: int, path: Path) -> None:
    message = f"{path} is being written by another kway index process: wait until it has finished"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other process may have finished and removed the file since it was opened here.
        if not os.path.samestat(os.fstat(descriptor), (path / _LOCK).stat()):
            raise ValueError(message)
    except (BlockingIOError, FileNotFoundError) as error:
        raise ValueError(message) from error


def _read_settings(file: Path) -> GallerySettings | None:
    try:
        return GallerySettings.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(f"{file} is damaged: remove {file.parent} and start again") from error


def _check_same(
    path: Path, found: GallerySettings, expected: GallerySettings, *, force: bool
) -> None:
    if (found.reads, found.backbone, found.dim) != (
        expected.reads,
        expected.backbone,
        expected.dim,
    ):
        raise ValueError(
            f"{path} was created with a different backbone or preprocessing: pass another path "
            f"with --out, or remove {path}"
        )
    if found.thumbnails != expected.thumbnails:
        option = "--thumbnails" if found.thumbnails else "--no-thumbnails"
        raise ValueError(f"{path} was created with {option}: pass {option}, or remove {path}")
    if found.source != expected.source and not force:
        raise ValueError(
            f"{path} was created from {found.source}, not from {expected.source}: pass another "
            "path with --out, or --force if the collection has moved"
        )
