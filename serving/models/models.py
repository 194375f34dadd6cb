"""The models of a replica. Each has one current version, which can be replaced at any time.

A request takes the current version of its model once, when it starts, and uses nothing else. So an
answer never mixes two versions, and an old version is freed when its last request has ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from serving.api_error import ApiError
from serving.galleries.searching import Galleries
from serving.service import Service
from serving.statistics import ModelStatistics
from trainer.bundle.spec import LossSpec


@dataclass(frozen=True)
class Version:
    """A bundle that is loaded, and the galleries that are searched with it."""

    service: Service
    galleries: Galleries

    @property
    def id(self) -> str:
        return self.service.version


class ServedModel:
    """The model `name`. `current` may be replaced from any thread. `is_rejected` is true while a
    version that cannot be served is published."""

    def __init__(self, name: str, current: Version) -> None:
        self.name, self.current, self.is_rejected = name, current, False


class ModelState(NamedTuple):
    """What metrics report about a model."""

    name: str
    version: str
    loss: LossSpec
    is_rejected: bool


class ReplicaState(NamedTuple):
    """What metrics report about a replica. `drifted` of the `monitored` classes have drifted."""

    requests: int
    queued_inputs: int
    monitored: int
    drifted: int
    models: tuple[ModelState, ...]


class Models:
    """The models of a replica by name. The first one is the default."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.default = models[0]
        self._by_name = {model.name: model for model in models}
        assert len(self._by_name) == len(models), "two models have the same name"

    @classmethod
    def of(cls, service: Service) -> "Models":
        """Return a single model with the galleries of its configuration."""
        galleries = Galleries(service.config.galleries, service.model.bundle)
        return cls([ServedModel(service.name, Version(service, galleries))])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> ServedModel:
        """Return the model `name`. Raises ApiError 404 if it does not exist."""
        if name not in self._by_name:
            known = ", ".join(self._by_name)
            message = f"unknown model {name[:80]!r}. Models on this server: {known}"
            raise ApiError(404, "unknown_model", message)
        return self._by_name[name]

    def check_health(self) -> None:
        """Raise RuntimeError if a forward pass has hung."""
        for model in self:
            model.current.service.check_health()

    def statistics(self) -> dict[str, ModelStatistics]:
        """Return the statistics of each model."""
        return {model.name: model.current.service.statistics for model in self}

    def state(self) -> ReplicaState:
        """Can be called from any thread."""
        models = [(model.current.service, model.is_rejected) for model in self]
        services = [service for service, _ in models]
        monitored = [service.num_monitored() for service in services]
        return ReplicaState(
            services[0].load()[0],  # all models share the limit on requests
            sum(service.load()[1] for service in services),
            sum(count for count, _ in monitored),
            sum(drifted for _, drifted in monitored),
            tuple(
                ModelState(service.name, service.version, service.model.bundle.spec.loss, rejected)
                for service, rejected in models
            ),
        )
