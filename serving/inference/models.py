"""The models of a replica in the Open Inference Protocol."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from serving.inference.model_config import ModelIndex
from serving.inference.statistics import ModelStatistics, statistics_of
from serving.inference.tensors import InferenceModel

if TYPE_CHECKING:
    from serving.models.models import Models


class InferenceModels:
    """The current versions of `models`. `metrics` returns the page at /metrics, which contains the
    statistics of all replicas."""

    def __init__(self, models: "Models", metrics: Callable[[], Awaitable[bytes]]) -> None:
        self._models, self._metrics = models, metrics

    @property
    def default(self) -> InferenceModel:
        return InferenceModel(self._models.default.current.service)

    def named(self, name: str, version: str = "") -> InferenceModel:
        """Return a model. Raises ApiError 404 if it does not exist or if a version is requested."""
        known = name if name in self._models else self._models.default.name
        found = InferenceModel(self._models[known].current.service)
        found.check(name, version)
        return found

    def is_ready(self) -> bool:
        return all(one.is_ready() for one in self._all())

    def index(self, *, only_ready: bool = False) -> list[ModelIndex]:
        """Return the names and states of all models, or of those that are ready."""
        states = {one.name: one.is_ready() for one in self._all()}
        return [
            ModelIndex(name=name, state="READY" if is_ready else "UNAVAILABLE")
            for name, is_ready in states.items()
            if is_ready or not only_ready
        ]

    async def statistics(self, name: str = "") -> list[ModelStatistics]:
        """Return the statistics of a model, or of all models."""
        page = await self._metrics()
        names = [name] if name else [one.name for one in self._all()]
        return statistics_of(page, names)

    def _all(self) -> list[InferenceModel]:
        return [InferenceModel(model.current.service) for model in self._models]
