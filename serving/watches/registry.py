"""`Registry`: the watches of all clients, with the changes since a version."""

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import takewhile

from serving.config import ServingConfig
from serving.watches.storage import Storage
from serving.watches.watch import (
    Changes,
    NoWatchesError,
    Terms,
    UnknownWatchError,
    Watch,
    WatchLimitError,
)

# A replica that has missed more removals than this receives the complete list.
_REMEMBERED_REMOVALS = 1000
# The heap of expiry times is rebuilt if renewals have left more outdated entries than watches.
_SPARE_EXPIRIES = 100


class Registry:
    """Stores the watches within the limits of `config`. `storage` maps their ids to JSON; its other
    keys contain a slash.

    Every change increments `version`, so a replica can request the changes since its own version.
    Versions restart from 0 with the process; `epoch` identifies the process.
    """

    def __init__(
        self,
        config: ServingConfig,
        *,
        clock: Callable[[], float],
        storage: Storage,
    ) -> None:
        self.config = config
        self.epoch, self.version = secrets.token_hex(8), 0
        self._clock, self._storage = clock, storage
        watches = [
            Watch.model_validate_json(text) for key, text in storage.items() if "/" not in key
        ]
        self._watches: dict[str, Watch] = {}
        self._by_client: dict[str, set[str]] = {}
        self._expiries: list[tuple[float, str]] = []  # a heap; may contain earlier times of a watch
        self._changed_at: dict[str, int] = {}  # in the order of the versions
        for watch in watches:
            self._add(watch)
        self._removals: deque[tuple[int, str]] = deque()
        self._removals_known_since = 0

    def __contains__(self, watch_id: object) -> bool:
        return watch_id in self._watches

    def create(self, client: str, terms: Terms) -> Watch:
        """Create a watch. Raises WatchLimitError if there are too many watches, and NoWatchesError
        if the configuration disables them."""
        self._check_limits(client)
        now = self._clock()
        # Dump only the fields of Terms, so that `terms` cannot set the other fields of Watch.
        watch = Watch(
            **terms.model_dump(include=set(Terms.model_fields)),
            id=secrets.token_hex(8),
            client=client,
            created_at=now,
            expires_at=now + terms.ttl_seconds,
        )
        self._put(watch)
        return watch

    def owned(self, client: str) -> list[Watch]:
        """Return the client's watches, oldest first."""
        mine = [self._watches[watch_id] for watch_id in self._by_client.get(client, ())]
        return sorted(mine, key=lambda watch: watch.created_at)

    def watches(self) -> Iterable[Watch]:
        """Return the watches of all clients."""
        return self._watches.values()

    def find(self, watch_id: str) -> Watch | None:
        """Return a watch of any client, or None if it does not exist."""
        return self._watches.get(watch_id)

    def get(self, client: str, watch_id: str) -> Watch:
        """Return a watch. Raises UnknownWatchError, even if the watch belongs to another client."""
        watch = self._watches.get(watch_id)
        if watch is None or watch.client != client or watch.expires_at <= self._clock():
            raise UnknownWatchError(
                f"watch {watch_id[:40]!r} does not exist: it may have expired or been deleted"
            )
        return watch

    def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        """Replace `fields` of a watch's terms and restart its time to live."""
        unknown = set(fields) - set(Terms.model_fields)
        assert not unknown, f"{unknown} are not fields of Terms"
        watch = self.get(client, watch_id).model_copy(update=dict(fields))
        watch = watch.model_copy(update={"expires_at": self._clock() + watch.ttl_seconds})
        self._put(watch)
        return watch

    def remove(self, client: str, watch_id: str) -> None:
        """Delete a watch. Raises UnknownWatchError, even if the watch belongs to another client."""
        self._drop(self.get(client, watch_id).id)

    def sweep(self) -> list[str]:
        """Remove expired watches and return their ids."""
        now = self._clock()
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            _, watch_id = heappop(self._expiries)
            watch = self._watches.get(watch_id)
            if watch is not None and watch.expires_at <= now:
                self._drop(watch_id)
                expired.append(watch_id)
        return expired

    def changes_since(self, epoch: str, version: int) -> Changes:
        """Return the changes since `version`, or the complete list if the epoch differs or the
        version is too old."""
        is_complete = epoch != self.epoch or version < self._removals_known_since
        newest_first = reversed(self._changed_at.items())
        changed = takewhile(lambda item: is_complete or item[1] > version, newest_first)
        watches = [self._watches[watch_id] for watch_id, _ in changed][::-1]
        removed = [watch_id for at, watch_id in self._removals if at > version and not is_complete]
        now = self._clock()
        return Changes(self.epoch, self.version, now, is_complete, tuple(watches), tuple(removed))

    def _check_limits(self, client: str) -> None:
        if not self.config.max_watches:
            raise NoWatchesError(
                "this server does not keep watches (--max-watches 0). Use a server that does"
            )
        limit = self.config.max_watches_per_client
        if len(self._by_client.get(client, ())) >= limit:
            raise WatchLimitError(
                f"you have reached your limit of {limit} watches. Delete another watch first"
            )
        limit = self.config.max_watches
        if len(self._watches) >= limit:
            raise WatchLimitError(
                f"the server has reached its limit of {limit} watches. Try again later"
            )

    def _put(self, watch: Watch) -> None:
        self._storage.apply({watch.id: watch.model_dump_json().encode()})
        self.version += 1
        self._add(watch)

    def _add(self, watch: Watch) -> None:
        self._watches[watch.id] = watch
        self._by_client.setdefault(watch.client, set()).add(watch.id)
        self._changed_at.pop(watch.id, None)
        self._changed_at[watch.id] = self.version
        heappush(self._expiries, (watch.expires_at, watch.id))
        if len(self._expiries) > 2 * len(self._watches) + _SPARE_EXPIRIES:
            self._expiries = [(one.expires_at, one.id) for one in self._watches.values()]
            heapify(self._expiries)

    def _drop(self, watch_id: str) -> None:
        self._storage.apply({watch_id: None})
        client = self._watches.pop(watch_id).client
        self._by_client[client].discard(watch_id)
        if not self._by_client[client]:
            del self._by_client[client]
        del self._changed_at[watch_id]
        self.version += 1
        self._removals.append((self.version, watch_id))
        if len(self._removals) > _REMEMBERED_REMOVALS:
            self._removals_known_since, _ = self._removals.popleft()
