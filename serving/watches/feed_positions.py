"""`FeedPositions`: the last answered frame of each feed, from which a sender can resume."""

import json
from collections.abc import Mapping

from serving.watches.storage import Storage

FrameId = str | int
_FEED = "feed/"
# The oldest feeds of a client are forgotten first.
_MAX_PER_CLIENT = 1000


class FeedPositions:
    """Maps a client and the name of a feed to the id of the last answered frame."""

    def __init__(self, storage: Storage) -> None:
        self._positions: dict[str, dict[str, FrameId]] = {}
        for key, value in storage.items():
            if key.startswith(_FEED):
                client, feed = key.removeprefix(_FEED).rsplit("/", 1)
                self._positions.setdefault(client, {})[feed] = json.loads(value)

    def get(self, client: str, feed: str) -> FrameId | None:
        return self._positions.get(client, {}).get(feed)

    def changes(self, positions: Mapping[tuple[str, str], FrameId]) -> dict[str, bytes | None]:
        """Return the changes of the storage for new positions."""
        return {
            f"{_FEED}{client}/{feed}": json.dumps(frame).encode()
            for (client, feed), frame in positions.items()
        }

    def update(self, positions: Mapping[tuple[str, str], FrameId]) -> dict[str, bytes | None]:
        """Set positions that have been stored, and return the changes that remove the oldest ones
        beyond the limit."""
        removed: dict[str, bytes | None] = {}
        for (client, feed), frame in positions.items():
            feeds = self._positions.setdefault(client, {})
            feeds.pop(feed, None)
            feeds[feed] = frame
            if len(feeds) > _MAX_PER_CLIENT:
                oldest = next(iter(feeds))
                del feeds[oldest]
                removed[f"{_FEED}{client}/{oldest}"] = None
        return removed
