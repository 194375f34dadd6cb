"""`bundle.json`: the specification of a bundle and the names and checksums of its files.

Data that grows with the number of classes is in separate files (`trainer/bundle/class_list.py`,
`trainer/bundle/threshold_file.py`).
"""

import json
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from data.images.config import ImageConfig
from data.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE
from heads.logit_maps import Dot, LogitMapConfig
from heads.losses import Loss, ScoreKind
from trainer.backbone.config import Pooling, Precision

Reads = Literal["images", "texts"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Format 2 does not contain the validation counts of thresholds. Formats 2 and 3 do not contain the
# logit map, which is always `dot`. The thresholds of formats 2 to 4 promise nothing
# (`trainer/bundle/threshold_file.py`). Formats 2 to 5 have another class list
# (`trainer/bundle/class_list.py`).
FORMAT_VERSION, _OLDEST_VERSION = 6, 2
SPEC, CARD = "bundle.json", "MODEL_CARD.md"
BACKBONE, WEIGHTS, ENCODER = "backbone.safetensors", "class_weights.safetensors", "encoder"
TOKENIZER, ONNX = "tokenizer", "backbone.onnx"
CLASSES = "classes.safetensors"
LINES = "classes.jsonl"  # of formats 2 to 5
THRESHOLDS = "thresholds.safetensors"
TENSOR = "weight"  # the name of the tensor in the file WEIGHTS
_REQUIRED = (BACKBONE, WEIGHTS, CARD, CLASSES)
_ENCODER_CONFIG = f"{ENCODER}/config.json"
_OF_TEXTS = (f"{TOKENIZER}/{TOKENIZER_FILE}", f"{TOKENIZER}/{CONFIG_FILE}")


_VERSION_DIGITS = 16


class Spec(BaseModel):
    """The base class of specifications. Rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LossSpec(Spec):
    """The training loss. `aligned` means that it satisfies the Principle of Logit Separation."""

    kind: str
    aligned: bool
    score: ScoreKind = Field(
        "logit", description="kind of score that is compared with the thresholds"
    )
    eps: float = Field(0.0, description="epsilon of the `spherical` score")

    @classmethod
    def of(cls, loss: Loss) -> "LossSpec":
        return cls(kind=loss.kind, aligned=loss.aligned, score=loss.score_kind, eps=loss.score_eps)


class RecallSpec(Spec):
    """A recall, which the thresholds of the classes promise, and the pooled threshold."""

    recall: float = Field(gt=0, le=1)
    confidence: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="confidence of the guarantees and intervals; added in format 5",
    )
    pooled: Finite | None = Field(
        None, description="threshold computed from the positives of all classes"
    )
    pooled_samples: int | None = Field(
        None,
        gt=0,
        description="number of validation samples from which the pooled threshold was computed",
    )
    pooled_precision: float | None = Field(
        None,
        ge=0,
        le=1,
        description="in formats 3 and 4: fraction of the samples at or above the pooled threshold "
        "that belong to the class, averaged over the classes with samples",
    )
    below_pooled: float | None = Field(
        None,
        ge=0,
        le=1,
        description="fraction of the classes with validation samples in which fewer of them than "
        "the recall reach the pooled threshold; added in format 5",
    )
    min_positives: int | None = Field(
        None,
        gt=0,
        description="minimum number of validation samples that a class needs for a guaranteed "
        "threshold, or null if no number suffices; before format 5, for its own threshold",
    )


class TextSpec(Spec):
    """The tokenization of texts. The tokenizer itself is in a separate folder of the bundle."""

    max_length: int = Field(
        gt=0, description="maximum number of tokens per text, including special tokens"
    )


class BackboneSpec(Spec):
    """A backbone whose code is not in the bundle: its import path, its options, and the version of
    its source code at export.
    """

    kind: str
    options: dict[str, Any]
    source: str


class BundleSpec(Spec):
    """The specification without the checksums. A model reads either images or texts."""

    pooling: Pooling = "auto"
    precision: Precision = Field(
        "float32", description="precision in which the backbone runs and the thresholds were set"
    )
    backbone: BackboneSpec | None = Field(
        None, description="imported backbone; other backbones are described in encoder/config.json"
    )
    image: ImageConfig | None = Field(None, description="input specification of an image model")
    text: TextSpec | None = Field(None, description="input specification of a text model")
    num_classes: int = Field(gt=0)
    loss: LossSpec
    logits: LogitMapConfig = Field(
        Dot(), description="map from features and rows to logits; added in format 4"
    )
    bias: bool
    dim: int = Field(gt=0)
    recalls: tuple[RecallSpec, ...] = Field(
        (), description="recalls for which the bundle contains thresholds"
    )

    @model_validator(mode="after")
    def _reads_one_thing(self) -> "BundleSpec":
        if (self.image is None) == (self.text is None):
            raise ValueError(
                "a model reads either images or texts: set exactly one of image and text"
            )
        return self

    @property
    def reads(self) -> Reads:
        return "texts" if self.image is None else "images"

    @property
    def width(self) -> int:
        """The number of values per class in the class-weights file: the row, followed by the bias
        if there is one.
        """
        return self.dim + self.bias


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise ValueError(f"file name {name!r} refers to a location outside the bundle")
    return name


class FileEntry(Spec):
    """A file of the bundle."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class BundleManifest(Spec):
    """The contents of `bundle.json`."""

    format_version: Literal[2, 3, 4, 5, 6] = 6
    model: BundleSpec
    files: dict[Annotated[str, AfterValidator(_inside)], FileEntry]
    version: str = Field(
        "",
        exclude=True,
        description="hash of bundle.json, which contains all checksums; set on reading",
    )

    @model_validator(mode="after")
    def _complete(self) -> "BundleManifest":
        of_texts = () if self.model.text is None else _OF_TEXTS
        of_recalls = (THRESHOLDS,) if self.model.recalls else ()
        of_int8 = (ONNX,) if self.model.precision == "int8" else ()
        of_encoder = (_ENCODER_CONFIG,) if self.model.backbone is None else ()
        of_lines = (LINES,) if self.format_version < 6 else ()
        needed = (*_REQUIRED, *of_lines, *of_encoder, *of_int8, *of_texts, *of_recalls)
        missing = [name for name in needed if name not in self.files]
        if missing:
            raise ValueError(f"files has no entry for {missing[0]}")
        return self


def read_manifest(path: Path) -> BundleManifest:
    """Read `bundle.json` of the folder `path`.

    Raises FileNotFoundError if it does not exist, and ValueError if it is damaged or has an
    unsupported format version.
    """
    file = path / SPEC
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is not a bundle: {SPEC} is missing. Create a bundle with `kway export`"
        )
    text = file.read_bytes()
    try:
        version = json.loads(text).get("format_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): export or copy the bundle again") from error
    if isinstance(version, int) and not _OLDEST_VERSION <= version <= FORMAT_VERSION:
        fix = "update kway" if version > FORMAT_VERSION else "export the run again"
        raise ValueError(
            f"{path} has bundle format {version}, but this version of kway reads formats "
            f"{_OLDEST_VERSION} to {FORMAT_VERSION}: {fix}"
        )
    try:
        manifest = BundleManifest.model_validate_json(text)
        return manifest.model_copy(update={"version": sha256(text).hexdigest()[:_VERSION_DIGITS]})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{file}: {where}: {first['msg']}") from error
