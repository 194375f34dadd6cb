"""The board as a named Ray actor shared by all replicas, and the handle that replicas use.

Watches and hits survive a restart of the actor, because they are in the state folder
of `kway serve` or, on a cluster, in Ray's key-value store. Listeners are not stored: they
receive an error and must reconnect. Importing this module imports Ray.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.metrics import Counter  # unlike ray.serve.metrics, it does not import Ray Serve

from serving.config import ServingConfig
from serving.deploy.private_ray import KeyValueStore
from serving.watches.board import Board
from serving.watches.state_file import StateFile
from serving.watches.watch import Changes, HitBatch, Terms, Watch, WatchError, WatchesDownError

NAME, NAMESPACE = "kway-watches", "kway"
# Each listener and each replica keeps a call open while it waits for updates.
_MAX_CALLS = 10_000
_RESPONSE_SECONDS = 5.0
_WRITE_SECONDS = 10.0


class WebhookMetrics:
    """Delivery counters of the process that stores the watches."""

    def __init__(self) -> None:
        self._deliveries = Counter(
            "kway_webhook_deliveries_total",
            description="Number of requests to webhooks by outcome: ok or failed.",
            tag_keys=("outcome",),
        )
        self._lost = Counter(
            "kway_webhook_lost_hits_total",
            description="Number of hits that were dropped before they were delivered to a webhook.",
        )

    def count_delivery(self, outcome: str) -> None:
        self._deliveries.inc(1, tags={"outcome": outcome})

    def count_lost_hits(self, count: int) -> None:
        if count:
            self._lost.inc(count)


class WatchActor(Board):
    """The board, with its storage."""

    def __init__(self, config: dict[str, Any]) -> None:
        checked = ServingConfig.model_validate(config)
        state = checked.state
        storage = KeyValueStore(NAMESPACE) if state is None else StateFile(state)
        super().__init__(checked, storage=storage, counts=WebhookMetrics())
        # The event loop does not run yet. If Ray restarts the actor, no one else may call it.
        ray.get_runtime_context().current_actor.resume.remote()


class RayWatches:
    """`Watches` backed by the actor, which the first replica starts."""

    def __init__(self, config: ServingConfig, *, name: str = NAME) -> None:
        remote: Any = ray.remote(WatchActor)
        self._actor: Any = remote.options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # outlives the replica that created it
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=_MAX_CALLS,
        ).remote(config.model_dump(mode="json"))
        self._actor.configure.remote(config)  # an actor that is already running has its old limits

    async def create(self, client: str, terms: Terms) -> Watch:
        return await self.call("create", client, terms)

    async def owned(self, client: str) -> list[Watch]:
        return await self.call("owned", client)

    async def get(self, client: str, watch_id: str) -> Watch:
        return await self.call("get", client, watch_id)

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        return await self.call("change", client, watch_id, dict(fields))

    async def remove(self, client: str, watch_id: str) -> None:
        await self.call("remove", client, watch_id)

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        return await self.call("changed_since", epoch, version, wait_seconds, wait=wait_seconds)

    async def publish(
        self, hits: Sequence[tuple[str, str]], positions: Mapping[tuple[str, str], str | int]
    ) -> list[int | None]:
        return await self.call("publish", hits, positions, wait=_WRITE_SECONDS)

    async def position(self, client: str, feed: str) -> str | int | None:
        return await self.call("position", client, feed)

    async def listen(
        self, client: str, watch_id: str, after: int | None, limit_key: str | None = None
    ) -> tuple[str, int]:
        return await self.call("listen", client, watch_id, after, limit_key)

    async def take(self, listener: str, wait_seconds: float) -> HitBatch:
        return await self.call("take", listener, wait_seconds, wait=wait_seconds)

    async def leave(self, listener: str) -> None:
        await self.call("leave", listener)

    async def call(self, method: str, *arguments: object, wait: float = 0.0) -> Any:
        """Call a method of the actor. Raises WatchesDownError if it does not respond."""
        try:
            async with asyncio.timeout(wait + _RESPONSE_SECONDS):
                return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, WatchError):
                raise error.cause from None
            raise
        except (RayActorError, TimeoutError) as error:
            raise WatchesDownError("the watch service is not responding. Try again") from error
