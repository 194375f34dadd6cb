"""Logit maps: functions from features and class rows to logits.

    dot      z_j = s x·w_j + b_j + o
    cosine   z_j = s cos(x, w_j) + o, in training with a margin on the logit of the true class

A map defines the options of `head.logits` in a recipe and their math. Evaluation, export and
serving call `LogitMap.__call__`. In training, the engine applies the same steps block by block and
adds the margin and the prior. Losses receive only the logits.

To add a map, subclass `LogitMap`. Add a built-in map to `AnyLogitMap`; a recipe selects any other
map by its import path.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    WrapValidator,
    model_validator,
)
from torch import Tensor
from torch.nn.functional import linear

M1 = Annotated[float, Field(gt=0, le=8, description="multiplies the angle to the true class")]
M2 = Annotated[
    float, Field(ge=0, le=math.pi, description="margin added to the angle to the true class")
]
M3 = Annotated[
    float, Field(ge=0, le=2, description="margin subtracted from the cosine of the true class")
]

# Shape legend: b feature vectors, C classes, d dimensions.


@dataclass(frozen=True)
class ClassRows:
    """Rows of some classes: `class_ids` [C], `rows` [C, d] and `bias` [C] (None without a bias)."""

    class_ids: Tensor
    rows: Tensor
    bias: Tensor | None = None

    def __getitem__(self, part: slice) -> "ClassRows":
        bias = None if self.bias is None else self.bias[part]
        return ClassRows(self.class_ids[part], self.rows[part], bias)

    def to(self, device: torch.device) -> "ClassRows":
        bias = None if self.bias is None else self.bias.to(device)
        return ClassRows(self.class_ids.to(device), self.rows.to(device), bias)


class LogitMap(BaseModel):
    """Options of a logit map. `evaluated` returns the map without training-only options.

    `normalizes`: the map scales features and rows to unit length and does not support a bias. A
    user-defined map adds a margin in training. Evaluation and bundles use `Dot` or `Cosine`, so
    that serving needs no user code. Its `kind` is its import path.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    normalizes: ClassVar[bool] = False

    kind: str
    scale: float = Field(1.0, gt=0, description="multiplies the product of features and rows")
    offset: float = Field(0.0, description="added to every logit")
    learn_scale: bool = Field(False, description="train the logarithm of the scale")
    learn_offset: bool = Field(False, description="train the offset")
    prior: float = Field(
        0.0,
        ge=0,
        description="tau of logit adjustment; training adds tau log((n_j + 1) / (N + K)) to the "
        "logit of class j with n_j of N samples",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_import_path(cls, options: Any) -> Any:
        if isinstance(options, dict) and cls.model_fields["kind"].is_required():
            return {"kind": f"{cls.__module__}:{cls.__qualname__}", **options}
        return options

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Raise TypeError if a subclass overrides a method that training and serving do not call:
        the engine multiplies blocks of rows itself, and serving evaluates only dot products and
        cosines."""
        ignored = {"__call__", "evaluated", "normalized", "of_one_class"} & vars(cls).keys()
        if ignored:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(sorted(ignored))}, which training does not "
                "call: override with_margin and has_margin instead"
            )

    @property
    def has_margin(self) -> bool:
        """Whether training applies `with_margin` to the logit of the true class."""
        return False

    @property
    def is_plain(self) -> bool:
        """Whether logits are x·w + b, including in training."""
        return self == Dot()

    def normalized(self, vectors: Tensor) -> Tensor:
        """Normalize features or rows [n, d] if the map requires it, else return them unchanged."""
        return unit_vectors(vectors) if self.normalizes else vectors

    def gradient(self, vectors: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of `vectors` from `grad`, the gradient of `normalized(vectors)`."""
        with torch.enable_grad():
            leaf = vectors.detach().requires_grad_()
            result = self.normalized(leaf)
        (grad_vectors,) = torch.autograd.grad(result, leaf, grad.to(result.dtype))
        return grad_vectors

    def mapped(self, features: Tensor, scale: Tensor | float) -> Tensor:
        """Return `scale` times the normalized features [b, d], to be multiplied by class rows."""
        return _scaled(self.normalized(features), scale)

    def gradient_of_features(self, features: Tensor, scale: Tensor | float, grad: Tensor) -> Tensor:
        """Return the gradient of the features from `grad`, the gradient of `mapped`."""
        grad = _scaled(grad, scale)
        if self.normalizes:
            grad = self.gradient(features, grad)
        return grad.to(features.dtype)

    def with_margin(self, cosine: Tensor, eps: float) -> Tensor:
        """Map the cosines [b] between features and true rows to the values used in training."""
        raise NotImplementedError(f"{self.kind} logits do not support a margin")

    def evaluated(self, *, scale: float, offset: float) -> "LogitMap":
        """Return the map with this scale and offset, and without margin and prior."""
        if self.normalizes:
            return Cosine(scale=scale, offset=offset)
        return Dot(scale=scale, offset=offset)

    def __call__(self, features: Tensor, classes: ClassRows) -> Tensor:
        """Return the logits [b, C] of `classes` for `features` [b, d], in the dtype of the rows and
        without margin and prior."""
        rows = self.normalized(classes.rows)
        features = self.mapped(features.to(rows.dtype), self.scale)
        return linear(features, rows, self._shift(classes))

    def of_one_class(
        self, features: np.ndarray, row: ClassRows, inverse_norms: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the float32 logits [n] of one class. The features [n, d] may be memory-mapped from
        a file larger than memory. If the map normalizes, `inverse_norms` are those of
        `inverse_norms_of`, which are computed if they are None.

        A single NumPy product without a copy takes about half as long as products in blocks or a
        product in torch.
        """
        weight = self.scale * self.normalized(row.rows)[0]
        found = np.empty(len(features), np.float32)
        np.dot(features, weight.numpy(), out=found)
        if self.normalizes:
            found *= inverse_norms_of(features) if inverse_norms is None else inverse_norms
        shift = self._shift(row)
        if shift is not None:
            found += shift.numpy()
        return found

    def _shift(self, classes: ClassRows) -> Tensor | None:
        """Return bias + offset [C], to be added to the product, or None if there is neither."""
        if classes.bias is not None:
            return classes.bias + self.offset
        return classes.rows.new_full((len(classes.rows),), self.offset) if self.offset else None


class Dot(LogitMap):
    """s x·w + b + o: the product of features and rows."""

    kind: Literal["dot"] = "dot"


class CosineMap(LogitMap):
    """s cos(x, w) + o. Training replaces the cosine of the true class, cos(theta), with
    psi(m1 theta + m2) - m3 (Eq. 4 of ArcFace, Deng et al. 2019, for all three margins).

    psi equals the cosine up to pi and keeps decreasing beyond pi (Eq. 7 of SphereFace, Liu et al.
    2017): psi(phi) = (-1)^k cos(phi) - 2k with k = floor(phi / pi).
    """

    normalizes: ClassVar[bool] = True

    scale: float = Field(64.0, gt=0, description="multiplies the cosines")
    m1: M1 = 1.0
    m2: M2 = 0.0
    m3: M3 = 0.0

    @property
    def has_margin(self) -> bool:
        return (self.m1, self.m2, self.m3) != (1.0, 0.0, 0.0)

    def with_margin(self, cosine: Tensor, eps: float) -> Tensor:
        """Apply the margins to the cosine.

        Before the arccos, the cosine is clamped to [-1 + eps, 1 - eps], where the derivative of
        arccos is finite. Outside this range, the gradient is that of the clamped value, not zero.
        """
        if (self.m1, self.m2) != (1.0, 0.0):
            clamped = cosine.clamp(-1 + eps, 1 - eps).detach()
            angle = self.m1 * torch.acos(cosine + (clamped - cosine.detach())) + self.m2
            half_turns = (angle.detach() / math.pi).floor()
            cosine = torch.cos(angle - math.pi * half_turns) - 2 * half_turns
        return cosine - self.m3


class Cosine(CosineMap):
    """Cosine logits with any combination of margins (default: none)."""

    kind: Literal["cosine"] = "cosine"


class NormFace(CosineMap):
    """Cosine logits without margin (Wang et al. 2017)."""

    kind: Literal["normface"] = "normface"


class SphereFace(CosineMap):
    """A multiplicative margin m1 on the angle (Liu et al. 2017), with unit features and rows.

    The default of 1.35 is from Deng et al. 2019. The original uses m1 = 4 with annealing.
    """

    kind: Literal["sphereface"] = "sphereface"
    m1: M1 = 1.35


class CosFace(CosineMap):
    """A margin on the cosine (Wang et al. 2018)."""

    kind: Literal["cosface"] = "cosface"
    m3: M3 = 0.35


class ArcFace(CosineMap):
    """A margin on the angle (Deng et al. 2019)."""

    kind: Literal["arcface"] = "arcface"
    m2: M2 = 0.5


AnyLogitMap = Dot | Cosine | NormFace | SphereFace | CosFace | ArcFace
LogitMapConfig = Annotated[
    SerializeAsAny[AnyLogitMap],
    Discriminator("kind"),
    # Accept an instance of any map, including classes that are not in this union.
    WrapValidator(
        lambda value, validate: value if isinstance(value, LogitMap) else validate(value)
    ),
]


class Margins:
    """The true logits of G rows with margin, and their derivatives.

    The matrix product computes logits without a margin; the engine then replaces the true logit of
    each row. `slopes` are the derivatives of the true logits with a margin with respect to those
    without. `excess` is the term that the margin adds to the derivative with respect to the
    logarithm of the scale.
    """

    def __init__(self, logit_map: LogitMap, scale: Tensor | float, *, eps: float) -> None:
        self._map, self._scale, self._eps = logit_map, scale, eps

    def set(self, products: Tensor, shifts: Tensor | float) -> None:
        """Compute the logits from scaled cosines [G] and additive `shifts`."""
        with torch.enable_grad():
            cosines = (products / self._scale).requires_grad_()
            replaced = self._map.with_margin(cosines, self._eps)
        (self.slopes,) = torch.autograd.grad(replaced, cosines, torch.ones_like(replaced))
        scaled = self._scale * replaced.detach()
        self.logits = scaled + shifts
        self.excess = scaled - self.slopes * products

    def through(self, grad_G: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the gradient of the true logits to that of the logits without margins.

        Also returns the scalar that the margins add to the gradient of the logarithm of the scale.
        """
        return grad_G * self.slopes, (grad_G * self.excess).sum()


def _scaled(vectors: Tensor, scale: Tensor | float) -> Tensor:
    return scale * vectors if isinstance(scale, Tensor) or scale != 1 else vectors


def unit_vectors(vectors: Tensor) -> Tensor:
    """Divide each vector [n, d] by its Euclidean norm, in at least float32.

    A vector whose norm is 0 (or so small that its square is 0) becomes zero and has no gradient.
    """
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    norms, zero = _norms(wide)
    return wide * norms.reciprocal().masked_fill(zero, 0)


def inverse_norms_of(features: np.ndarray) -> np.ndarray:
    """Return the inverse norms [n] of features [n, d], or 0 for a zero vector."""
    norms = np.sqrt(np.einsum("nd,nd->n", features, features))
    least = np.finfo(norms.dtype).tiny ** 0.5
    found: np.ndarray = np.divide(1, norms, out=np.zeros_like(norms), where=norms > least)
    return found


def inverse_norms(vectors: Tensor) -> Tensor:
    """Return the factors [n, 1] by which `unit_vectors` multiplies, and 1 for a zero vector."""
    norms, _ = _norms(vectors)
    return norms.reciprocal()


def tangential(vectors: Tensor, grad: Tensor) -> Tensor:
    """Return the part of `grad` [n, d] that is orthogonal to each vector [n, d], in the dtype of
    `grad`; 0 for zero vectors.

    If the gradient of `unit_vectors` is divided by the norms, this is the gradient of the vectors.
    """
    units = unit_vectors(vectors).to(grad.dtype)
    along = torch.linalg.vecdot(units, grad).unsqueeze(1)
    _, zero = _norms(vectors)
    return (grad - along * units).masked_fill(zero, 0)


def _norms(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norms [n, 1], or 1 for zero vectors, and a mask [n, 1] of zero vectors."""
    wide = torch.promote_types(vectors.dtype, torch.float32)
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=wide)
    zero = norms <= torch.finfo(norms.dtype).tiny ** 0.5
    return norms.masked_fill(zero, 1), zero


def log_prior(tau: float, class_counts: Tensor) -> Tensor:
    """Return tau log((n_j + 1) / (N + K)) [K] (Menon et al. 2021, with one sample added to each
    class)."""
    counts = class_counts.double() + 1
    return tau * (counts / counts.sum()).log()
