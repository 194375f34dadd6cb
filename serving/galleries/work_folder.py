"""The work folder of a gallery, `GALLERY.partial`. It is locked during a run, removed on success,
and kept after a failure so that the next run can resume.

about.json      settings of the gallery; a run resumes only if its own settings match
rows-000000 …   the rows that each run has written; those of the last one become the gallery
old/            the previous gallery, between the two renames of a publish
"""

import os
import shutil
from collections.abc import Iterator
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
from serving.galleries.gallery import Rows, saved_rows
from trainer.bundle.bundle import Bundle

_SETTINGS, _LOCK = "about.json", "lock"


class WorkFolder:
    """The paths and operations of a work folder. Use `work_folder` to create it.

    `previous` describes the gallery that this run updates, if there is one.
    """

    def __init__(self, gallery: Path, settings: GallerySettings) -> None:
        self.gallery = Path(os.path.realpath(gallery))  # keep a symbolic link
        self.path = self.gallery.with_name(self.gallery.name + ".partial")
        self._old, self._settings = self.path / "old", settings
        self.previous: GalleryInfo | None = None

    def saved(self) -> list[Path]:
        """Return the folders with the rows of runs."""
        return sorted(self.path.glob("rows-*"))

    def earlier(self) -> list[Rows]:
        """Open the rows of the previous gallery and of interrupted runs."""
        rows = [saved_rows(folder, self._settings.dim) for folder in self.saved()]
        if self.previous is not None:
            rows.insert(0, Rows(self.gallery, self.previous.num_items, self._settings.dim))
        return rows

    def publish(self, rows: Path) -> None:
        """Replace the gallery with `rows`. If the process is killed between the two renames, the
        next run restores the previous gallery."""
        if self.gallery.exists():
            os.rename(self.gallery, self._old)
        os.rename(rows, self.gallery)
        sync(self.gallery.parent)  # a rename is durable only once its folder is synced

    def restore(self) -> None:
        """Undo or complete an interrupted publish."""
        if self._old.exists() and not self.gallery.exists():
            os.rename(self._old, self.gallery)
        shutil.rmtree(self._old, ignore_errors=True)

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
        work.restore()
        try:
            work.start(bundle, force=force)
            yield work
        except BaseException:
            if not any(saved_rows(folder, settings.dim).num_items for folder in work.saved()):
                shutil.rmtree(work.path)
            raise
        shutil.rmtree(work.path)
