"""One that listens to a watch: its hits, whatever replica computed them and whoever sent frames."""

from collections.abc import Awaitable, Callable

from serving.watches.lines import Dropped, Ended, Listening, Waiting
from serving.watches.watch import Watches

# After so long without a hit a line says that all is well; it finds dead connections, too.
WAIT_SECONDS = 10.0


async def listen_to(
    watches: Watches, client: str, watch_id: str, write: Callable[[str], Awaitable[None]]
) -> None:
    """Write the hits of a watch until it ends.

    Raises UnknownWatchError and ListenerLimitError before the first line, and UnknownListenerError
    and WatchesDownError at any time.
    """
    listener = await watches.listen(client, watch_id)
    try:
        await write(Listening(listening=watch_id).model_dump_json())
        while True:
            letters = await watches.take(listener, WAIT_SECONDS)
            if letters.dropped:
                await write(Dropped(dropped=letters.dropped).model_dump_json())
            for line in letters.lines:
                await write(line)
            if letters.ended is not None:
                await write(Ended(end=letters.ended).model_dump_json())
                return
            if not letters.lines and not letters.dropped:
                await write(Waiting().model_dump_json())
    finally:
        await watches.leave(listener)
