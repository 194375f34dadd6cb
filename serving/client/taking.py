"""Parts of an iterable that may let one wait, taken by a thread of its own, one ahead at most."""

import queue
import socket
from collections.abc import Iterable
from contextlib import suppress
from threading import Thread


class Taking:
    """`wake` can be read from, as by a selector, where there may be something to `take`.

    The thread does not keep the program from its end, and leaves after `close` as soon as the
    iterable gives a part.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.wake, far = socket.socketpair()
        self.wake.setblocking(False)
        self.is_over = False
        self._found: queue.Queue[bytes | BaseException | None] = queue.Queue(1)
        self._is_closed = False
        Thread(target=self._run, args=(parts, far), daemon=True).start()

    def take(self) -> bytes | None:
        """The next part; None where there is none yet or, if `is_over`, no more.

        Raises what the iterable raised.
        """
        with suppress(BlockingIOError):
            self.wake.recv(16)
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, bytes):
            return found
        self.is_over = True
        if found is not None:
            raise found
        return None

    def close(self) -> None:
        self._is_closed = True
        with suppress(queue.Empty):
            self._found.get_nowait()  # the thread may wait for this place
        self.wake.close()

    def _run(self, parts: Iterable[bytes], far: socket.socket) -> None:
        last = None
        with far:
            try:
                for part in parts:
                    if self._is_closed:
                        return
                    self._give(part, far)
            except BaseException as error:  # whatever it is: `take` raises it
                last = error
            if not self._is_closed:  # nobody would make room for it
                self._give(last, far)

    def _give(self, found: bytes | BaseException | None, far: socket.socket) -> None:
        self._found.put(found)
        with suppress(OSError):  # closed meanwhile
            far.send(b".")
