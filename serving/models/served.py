"""The model of a replica. It has one current version, which can be replaced at any time.

A request takes the current version once, when it starts, and uses nothing else. So an answer never
mixes two versions, and an old version is freed when its last request has ended.
"""

from dataclasses import dataclass
from typing import NamedTuple

from serving.galleries.searching import Galleries
from serving.service import Service
from trainer.bundle.spec import LossSpec


@dataclass(frozen=True)
class Version:
    """A bundle that is loaded, and the galleries that are searched with it."""

    service: Service
    galleries: Galleries

    @property
    def id(self) -> str:
        return self.service.version


class ReplicaState(NamedTuple):
    """What metrics report about a replica and its model."""

    name: str
    version: str
    loss: LossSpec
    is_rejected: bool
    requests: int
    queued_inputs: int


class ServedModel:
    """The model of a replica. `current` may be replaced from any thread. `is_rejected` is true
    while a version that cannot be served is published."""

    def __init__(self, current: Version) -> None:
        self.name, self.current, self.is_rejected = current.service.name, current, False

    @classmethod
    def of(cls, service: Service) -> "ServedModel":
        """Return a model with the galleries of its configuration."""
        galleries = Galleries(service.config.galleries, service.model.bundle)
        return cls(Version(service, galleries))

    def check_health(self) -> None:
        """Raise RuntimeError if a forward pass has hung."""
        self.current.service.check_health()

    def state(self) -> ReplicaState:
        """Can be called from any thread."""
        service = self.current.service
        return ReplicaState(
            service.name,
            service.version,
            service.model.bundle.spec.loss,
            self.is_rejected,
            *service.load(),
        )
