"""The one model of a server as the protocol sees it: its name, its tensors, its inference."""

from importlib.metadata import version

from serving.api_error import ApiError
from serving.inference.tensors import INPUTS, OUTPUTS, Inference, Tensor, asked, outputs_of
from serving.schemas import Answer
from serving.service import Service

SERVER_NAME, PLATFORM = "kway", "pytorch"
EXTENSIONS = ("binary_tensor_data",)
_DATATYPES = {"class_ids": "INT64", "scores": "FP32", "thresholds": "FP32", "matches": "BOOL"}
_SHAPES = {"scores": (-1, -1), "thresholds": (-1,), "matches": (-1, -1)}


class InferenceModel:
    """A `Service` that answers in tensors. Every refusal is an ApiError."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.name = service.model.bundle.path.name

    @property
    def server_version(self) -> str:
        return version("kway")

    def check(self, name: str, model_version: str) -> None:
        """Raises ApiError (404) for another model, or any version: there is one."""
        if name != self.name:
            message = f"model {name[:80]!r} is unknown: this server has {self.name!r}"
            raise ApiError(404, "unknown_model", message)
        if model_version:
            message = f"model {self.name!r} has no versions: leave {model_version[:80]!r} out"
            raise ApiError(404, "unknown_version", message)

    def is_ready(self) -> bool:
        try:
            self._service.check_health()
        except RuntimeError:
            return False
        return True

    @property
    def inputs(self) -> list[Tensor]:
        """What a request holds, without data; a dimension of -1 is free."""
        read = INPUTS[self._service.model.reads]
        return [Tensor(read, "BYTES", (-1,), ()), Tensor("class_ids", "INT64", (-1,), ())]

    @property
    def outputs(self) -> list[Tensor]:
        return [Tensor(name, _DATATYPES[name], _SHAPES[name], ()) for name in OUTPUTS]

    async def infer(self, inference: Inference) -> tuple[list[Tensor], Answer]:
        """The wanted outputs, and the answer that they are of. Call it while admitted."""
        service = self._service
        reads = service.model.reads
        request = await service.in_thread(asked, inference, reads, service.config)
        question = await service.question(request.classes, request.recall, request.threshold)
        answer = await service.answer(request.inputs, question)
        return outputs_of(answer, request), answer
