"""The work folder of a gallery, `GALLERY.partial`. It is locked during a run, removed on success,
and kept after a failure so that the next run can resume.

about.json           settings of the gallery; a run resumes only if its own settings match
rows-000000-512/ …   rows of interrupted runs, with their number, see `gallery.write_rows`
listing.jsonl        all items of the collection
gallery/             the finished gallery, or the next rows, until they are complete
old/                 the previous gallery, between the two renames of a publish
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from data.files import commit, explained, lock, sync
from serving.galleries.format import (
    GALLERY,
    GalleryInfo,
    GallerySettings,
    check_same_backbone,
    read_info,
)
from serving.galleries.gallery import Row, Rows, write_rows
from trainer.bundle.bundle import Bundle

_SETTINGS, _LOCK = "about.json", "lock"


class WorkFolder:
    """The paths and operations of a work folder. Use `work_folder` to create it.

    `previous` describes the gallery that this run updates, if there is one.
    """

    def __init__(self, gallery: Path, settings: GallerySettings) -> None:
        self.gallery = Path(os.path.realpath(gallery))  # keep a symbolic link
        self.path = self.gallery.with_name(self.gallery.name + ".partial")
        self.listing, self.finished = self.path / "listing.jsonl", self.path / "gallery"
        self.old, self._settings = self.path / "old", settings
        self.previous: GalleryInfo | None = None

    def saved(self) -> list[Path]:
        """Return the folders with the rows of interrupted runs."""
        return sorted(self.path.glob("rows-*"))

    def rows(self) -> list[Rows]:
        """Open the rows of the previous gallery and of interrupted runs."""
        sizes = [(one, int(one.name.split("-")[2])) for one in self.saved()]
        if self.previous is not None:
            sizes.insert(0, (self.gallery, self.previous.num_items))
        return [Rows(path, num_rows, self._settings.dim) for path, num_rows in sizes]

    def save(self, rows: Sequence[Row]) -> None:
        """Keep computed rows, even if the process is killed."""
        if rows:
            target = self.path / f"rows-{len(self.saved()):06}-{len(rows)}"
            shutil.rmtree(self.finished, ignore_errors=True)  # left by an interrupted call
            write_rows(self.finished, rows, len(rows), self._settings.dim)
            os.rename(self.finished, target)
            sync(self.path)

    def publish(self) -> None:
        """Replace the gallery with the finished one. If the process is killed between the two
        renames, the next run restores the previous gallery."""
        if self.gallery.exists():
            os.rename(self.gallery, self.old)
        os.rename(self.finished, self.gallery)
        sync(self.gallery.parent)  # a rename is durable only once its folder is synced

    def start(self, bundle: Bundle, *, force: bool) -> None:
        """Check that existing rows have the settings of this run, then record the settings. With
        `force`, a different source is accepted."""
        file, existing = self.path / _SETTINGS, {}
        try:
            if file.exists():
                existing[self.path] = GallerySettings.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{file} is damaged: remove {self.path} and start again") from error
        if (self.gallery / GALLERY).is_file():
            existing[self.gallery] = self.previous = read_info(self.gallery)
        elif self.gallery.exists():
            raise ValueError(f"{self.gallery} exists, but it is not a gallery: pass another path")
        for path, found in existing.items():
            check_same_backbone(path, found, bundle)
            if found.thumbnails != self._settings.thumbnails:
                option = "--thumbnails" if found.thumbnails else "--no-thumbnails"
                raise ValueError(
                    f"{path} was created with {option}: pass {option}, or remove {path}"
                )
            if found.source != self._settings.source and not force:
                raise ValueError(
                    f"{path} was created from {found.source}, not from {self._settings.source}: "
                    "pass another path with --out, or --force if the collection has moved"
                )
        commit(file, self._settings.model_dump_json(indent=1).encode())


@contextmanager
def work_folder(
    gallery: Path, settings: GallerySettings, bundle: Bundle, *, force: bool
) -> Iterator[WorkFolder]:
    """Create and lock the work folder of `gallery`. The body of the `with` statement must publish
    the gallery unless the existing one is up to date. On success, the work folder is removed.

    If the body fails, its saved rows are kept for the next run. Raises ValueError if another
    process is writing the gallery, or if existing rows have different settings.
    """
    work = WorkFolder(gallery, settings)
    work.path.mkdir(parents=True, exist_ok=True)
    with (work.path / _LOCK).open("ab") as held, explained(work.path):
        busy = f"{work.path} is being written by another kway index process"
        lock(held, work.path / _LOCK, busy)
        # Undo or complete an interrupted publish.
        if work.old.exists() and not work.gallery.exists():
            os.rename(work.old, work.gallery)
        for folder in (work.old, work.finished):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            work.start(bundle, force=force)
            yield work
        except BaseException:
            shutil.rmtree(work.finished, ignore_errors=True)
            if not work.saved():
                shutil.rmtree(work.path)
            raise
        shutil.rmtree(work.path)
