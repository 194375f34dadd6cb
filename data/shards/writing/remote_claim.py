"""Claims a folder of an object store while shards are written to it.

An object store has no locks. `unfinished.json` names the process that writes to the folder, which
changes the object regularly. If the object has not changed for a while, another process takes the
folder over. This does not depend on clocks. Two processes can still write to the same folder, for
example if one of them had no network connection for some time. The shards are right even then,
because both processes write the same bytes.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from data.shards.manifest import MANIFEST, SourceInfo
from data.shards.writing.claim import UNFINISHED, check_same, written_here

if TYPE_CHECKING:
    from data.shards.writing.remote_output import RemoteOutput

_log = logging.getLogger("kway.data")

BEAT_SECONDS = 10.0
_STALE_BEATS = 3


class _Note(BaseModel):
    """The content of `unfinished.json`. writer: a random ID, or empty if no process is writing."""

    source: SourceInfo
    writer: str
    beat: int = 0


@contextmanager
def claimed(output: "RemoteOutput", about: SourceInfo) -> Iterator[Callable[[], None]]:
    """See `OutputFolder.claimed`."""
    claim = _Claim(output, _Note(source=about, writer=secrets.token_hex(8)))
    finished_before = MANIFEST in output.files()
    claim.take()
    try:
        with claim.beating():
            yield claim.check
    except ValueError:
        if not finished_before and not claim.is_lost:
            output.delete(file for file in output.files() if written_here(file))
        raise
    except BaseException:
        with suppress(OSError):
            claim.release()
        raise
    output.delete([UNFINISHED])


class _Claim:
    def __init__(self, output: "RemoteOutput", note: _Note) -> None:
        self._output = output
        self._note = note
        self.is_lost = False

    def take(self) -> None:
        if (found := self._read()) is None:
            self._check_free()
            if not self._output.create(UNFINISHED, self._content()):
                raise ValueError(self._busy())
        else:
            check_same(self._output.folder, found.source, self._note.source)
            if found.writer:
                self._wait_until_stale(found)
            self._write()
        self._look()
        self.check()

    def check(self) -> None:
        """Raise ValueError if another process has taken the folder over."""
        if self.is_lost:
            raise ValueError(self._busy())

    def release(self) -> None:
        """Let another process resume immediately."""
        self._look()
        if not self.is_lost:
            self._note.writer = ""
            self._write()

    @contextmanager
    def beating(self) -> Iterator[None]:
        stop = Event()
        thread = Thread(target=self._beat, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _beat(self, stop: Event) -> None:
        while not stop.wait(BEAT_SECONDS) and not self.is_lost:
            try:
                self._look()
                if not self.is_lost:
                    self._note.beat += 1
                    self._write()
            except OSError as error:
                _log.warning("%s", error)  # the writer reports an error that persists

    def _look(self) -> None:
        """Check that no other process has taken the folder over."""
        try:
            found = self._read()
        except ValueError:
            # If another process has taken over, it finds this process's note and stops.
            _log.warning("%s is damaged: writing it again", self._output.location(UNFINISHED))
            return
        self.is_lost = found is None or found.writer != self._note.writer

    def _wait_until_stale(self, found: _Note) -> None:
        seconds = _STALE_BEATS * BEAT_SECONDS
        _log.warning(
            "%s: waiting %.0f s to check that no other process is writing to it",
            self._output,
            seconds,
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 2)
            now = self._read()
            if now is None or (now != found and now.writer):
                raise ValueError(self._busy())
            if not now.writer:
                return

    def _read(self) -> _Note | None:
        try:
            return _Note.model_validate_json(self._output.read(UNFINISHED))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            url = self._output.location(UNFINISHED)
            raise ValueError(f"{url} is damaged: delete it and run kway shard again") from error

    def _write(self) -> None:
        self._output.write(UNFINISHED, self._content())

    def _content(self) -> bytes:
        return self._note.model_dump_json(indent=1).encode()

    def _check_free(self) -> None:
        """Raise ValueError unless the folder is empty or contains finished shards of the source."""
        about = self._note.source
        if (manifest := self._output.manifest()) is not None:
            check_same(self._output.folder, manifest.source, about)
        elif others := sorted(self._output.files()):
            raise ValueError(
                f"{self._output} is not empty (it contains {others[0]}), so {about} cannot be "
                "written to it: choose an empty folder, or delete this one"
            )

    def _busy(self) -> str:
        return (
            f"{self._output} is being written by another kway shard process: wait until it finishes"
        )
