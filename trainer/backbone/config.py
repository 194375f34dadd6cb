"""The backbone in a recipe: where its architecture and its initial weights come from."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from data.base_config import FrozenConfig

Pooling = Literal["auto", "cls", "mean", "classifier"]
Precision = Literal["float32", "bf16", "int8"]


class BackboneOptions(FrozenConfig, ABC):
    """Options shared by all backbones."""

    pooling: Pooling = Field(
        "auto",
        description="pooling of the encoder's output; auto uses the first token of a sequence or "
        "the mean of a feature map, and classifier uses the input of the last linear layer of a "
        "…ForImageClassification or …ForSequenceClassification model",
    )
    batch_norm: Literal["sync", "local", "frozen"] = "sync"
    init: Path | None = Field(
        None, description="bundle from which the initial weights of the backbone are loaded"
    )

    @property
    @abstractmethod
    def label(self) -> str:
        """The name shown in tables and model cards."""


class ImportedBackbone(BackboneOptions):
    """A backbone created by a user-defined class or function.

    `kind` is its import path; the other keys are its arguments. `trainer/imports.py` creates these
    configs after it has imported the object and checked the arguments.
    """

    model_config = ConfigDict(extra="allow")

    kind: str

    @property
    def label(self) -> str:
        return self.kind

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the class or function."""
        return dict(self.model_extra or {})


class BackboneConfig(BackboneOptions):
    """A transformers encoder, specified by `name` (a hub ID or local folder), `config` (the fields
    of its configuration) or `init` (a bundle).

    `config` accepts `model_type` and any field of that type's transformers configuration:
    `{model_type: resnet}` is ResNet-50, and `{model_type: bert, vocab_size: 119547}` is
    multilingual BERT.
    """

    kind: Literal["transformers"] = "transformers"
    name: str | None = None
    config: dict[str, Any] | None = None
    weights: Literal["random", "pretrained"] = "random"

    @model_validator(mode="after")
    def _one_source(self) -> "BackboneConfig":
        if self.name is not None and self.config is not None:
            raise ValueError("set only one of name and config")
        if self.name is None and self.config is None and self.init is None:
            raise ValueError("set name, config or init")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config requires model_type, for example resnet or bert")
        if self.weights == "pretrained" and self.name is None:
            raise ValueError("weights=pretrained requires name")
        if self.weights == "pretrained" and self.init is not None:
            raise ValueError("weights=pretrained and init both set the weights: remove one of them")
        return self

    @property
    def label(self) -> str:
        return self.name or (self.config or {}).get("model_type") or str(self.init)
