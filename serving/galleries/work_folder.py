"""The work folder of a gallery: next to it, locked, kept after a kill, and removed on success.

about.json      what it becomes; a run resumes only if this is identical
part-000/ …     what each run computed, see `serving/galleries/rows.py`
listing.jsonl   the items of this run; missing.jsonl: those of them to compute
gallery/        the finished gallery, before it is moved into place
old/            the gallery that it replaces, between two renames
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
_ABOUT, _LOCK = "about.json", "lock"


class About(Spec):
    """The properties that must be equal for two runs to produce the same gallery."""

    reads: Reads
    backbone: Sha256
    dim: int
    thumbnails: bool
    source: str

    @classmethod
    def of(cls, info: GalleryInfo) -> "About":
        return cls.model_validate(info.model_dump(include=set(cls.model_fields)))


class WorkFolder:
    """The work folder of one gallery. Create it with `work_folder`."""

    def __init__(self, gallery: Path) -> None:
        self.gallery = gallery
        self.path = _work_path(gallery)
        self.listing, self.missing = self.path / "listing.jsonl", self.path / "missing.jsonl"
        self.unreadable = self.path / "unreadable.jsonl"
        self.finished, self._old = self.path / "gallery", self.path / "old"

    def indexed(self) -> list[Path]:
        """Folders of rows that were computed before: parts, and the gallery itself."""
        parts = [part for part in sorted(self.path.glob("part-*")) if (part / COMMITTED).is_file()]
        return [*parts, self.gallery] if (self.gallery / GALLERY).is_file() else parts

    def new_part(self) -> Path:
        """The path of the next part, which does not exist yet."""
        numbers = [int(part.name.removeprefix("part-")) for part in self.path.glob("part-*")]
        return self.path / f"part-{max(numbers, default=-1) + 1:03d}"

    def publish(self) -> None:
        """Move the finished gallery into place. If the process is killed between the two renames,
        the next run recovers."""
        if self.gallery.exists():
            os.rename(self.gallery, self._old)
        os.rename(self.finished, self.gallery)
        # A rename is durable only once its folder is synced.
        folder = os.open(self.gallery.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def leave(self) -> None:
        """After a failure: keep the parts that contain rows, and remove the folder if there are
        none."""
        for part in self.path.glob("part-*"):
            committed = part / COMMITTED
            if not (committed.is_file() and int(committed.read_bytes())):
                shutil.rmtree(part)
        if not any(self.path.glob("part-*")):
            shutil.rmtree(self.path)

    def recover(self) -> None:
        """Undo or complete a `publish` that was interrupted by a kill."""
        if self._old.exists() and not self.gallery.exists():
            os.rename(self._old, self.gallery)
        for left in (self._old, self.finished):
            shutil.rmtree(left, ignore_errors=True)

    def settle(self, about: About, *, force: bool) -> None:
        """Check that existing results match `about`. `force` accepts a different source."""
        held = [(self.path, _read_about(self.path / _ABOUT))]
        if (self.gallery / GALLERY).is_file():
            held.append((self.gallery, About.of(read_info(self.gallery))))
        elif self.gallery.exists():
            raise ValueError(f"{self.gallery} exists and is no gallery: name another place")
        for path, there in held:
            if there is not None:
                _check_same(path, there, about, force=force)
        commit(self.path / _ABOUT, about.model_dump_json(indent=1).encode())


@contextmanager
def work_folder(gallery: Path, about: About, *, force: bool = False) -> Iterator[WorkFolder]:
    """Own the work folder of `gallery`. The block must publish the gallery; on success the work
    folder is then removed.

    If the block fails, its results are kept for the next run. Raises ValueError if another process
    is writing the gallery, or if existing results do not match `about`.
    """
    work = WorkFolder(gallery)
    is_new = not work.path.exists()
    work.path.mkdir(parents=True, exist_ok=True)
    with (work.path / _LOCK).open("ab") as held, explained(work.path):
        _lock(held.fileno(), work.path)
        work.recover()
        try:
            work.settle(about, force=force)
        except ValueError:
            if is_new:
                shutil.rmtree(work.path)
            raise
        try:
            yield work
        except BaseException:
            work.leave()
            raise
        shutil.rmtree(work.path)


def _work_path(gallery: Path) -> Path:
    return gallery.with_name(gallery.name + _SUFFIX)


def _lock(descriptor: int, path: Path) -> None:
    message = f"{path} is being written by another kway index: wait for it"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other process may have finished and removed this file since it was opened.
        if not os.path.samestat(os.fstat(descriptor), (path / _LOCK).stat()):
            raise ValueError(message)
    except (BlockingIOError, FileNotFoundError) as error:
        raise ValueError(message) from error


def _read_about(file: Path) -> About | None:
    try:
        return About.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(f"{file} is damaged: remove {file.parent} and start again") from error


def _check_same(path: Path, there: About, asked: About, *, force: bool) -> None:
    if (there.reads, there.backbone, there.dim) != (asked.reads, asked.backbone, asked.dim):
        raise ValueError(
            f"{path} holds features of another backbone, or of other preprocessing: name another "
            "place with --out, or remove it"
        )
    if there.thumbnails != asked.thumbnails:
        was = "with" if there.thumbnails else "without"
        raise ValueError(f"{path} was made {was} thumbnails: do so again, or remove it")
    if there.source != asked.source and not force:
        raise ValueError(
            f"{path} was made of {there.source}, not of {asked.source}: name another place with "
            "--out, or give --force where the collection has moved"
        )
