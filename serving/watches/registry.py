"""`Registry`: the watches of all clients, with the changes since a version."""

import secrets
from collections import deque
from collections.abc import Callable, Mapping

from serving.config import ServingConfig
from serving.watches.storage import Storage
from serving.watches.watch import Changes, Terms, UnknownWatchError, Watch, WatchLimitError

# A replica that has missed more removals than this receives the complete list.
_REMEMBERED_REMOVALS = 1000


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
        self._watches = {watch.id: watch for watch in watches}
        self._changed_at = dict.fromkeys(self._watches, 0)
        self._removals: deque[tuple[int, str]] = deque()
        self._removals_known_since = 0

    def __contains__(self, watch_id: object) -> bool:
        return watch_id in self._watches

    def create(self, client: str, terms: Terms) -> Watch:
        """Create a watch. Raises WatchLimitError if there are too many watches."""
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
        mine = [watch for watch in self._watches.values() if watch.client == client]
        return sorted(mine, key=lambda watch: watch.created_at)

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
        expired = [watch.id for watch in self._watches.values() if watch.expires_at <= now]
        for watch_id in expired:
            self._drop(watch_id)
        return expired

    def changes_since(self, epoch: str, version: int) -> Changes:
        """Return the changes since `version`, or the complete list if the epoch differs or the
        version is too old."""
        is_complete = epoch != self.epoch or version < self._removals_known_since
        watches = [
            watch
            for watch in self._watches.values()
            if is_complete or self._changed_at[watch.id] > version
        ]
        removed = [watch_id for at, watch_id in self._removals if at > version and not is_complete]
        now = self._clock()
        return Changes(self.epoch, self.version, now, is_complete, tuple(watches), tuple(removed))

    def _check_limits(self, client: str) -> None:
        limit = self.config.max_watches_per_client
        if len(self.owned(client)) >= limit:
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
        self._watches[watch.id] = watch
        self.version += 1
        self._changed_at[watch.id] = self.version

    def _drop(self, watch_id: str) -> None:
        self._storage.apply({watch_id: None})
        del self._watches[watch_id], self._changed_at[watch_id]
        self.version += 1
        self._removals.append((self.version, watch_id))
        if len(self._removals) > _REMEMBERED_REMOVALS:
            self._removals_known_since, _ = self._removals.popleft()
