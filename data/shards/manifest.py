"""`manifest.json`: the contents of a folder of shards.

The manifest is written last, so a folder without it is unfinished. Per-sample data is stored in the
offset index of each shard (`data/shards/index.py`), not here. The manifest contains its class list,
unless there are more than `MAX_INLINE_CLASSES`: then it refers to a file of columns.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationError,
    WrapValidator,
    model_serializer,
    model_validator,
)

from data.classes.class_list import ClassInfo, ClassList
from data.classes.strings import Strings
from data.files import sha256_of
from data.remote.cache import read_mapped
from data.remote.config import DEFAULT_CACHE, CacheConfig, address, folder_or_url, is_url
from data.remote.fetch import read_file
from data.retry import retried
from data.tars.headers import BLOCK

MANIFEST = "manifest.json"
LABEL_VECTORS = "label_vectors.safetensors"
CLASSES = "classes.safetensors"
MAX_INLINE_CLASSES = 1 << 16
FORMAT_VERSION = 4

_MAX_MANIFEST_BYTES = 1 << 30
_MIN_BYTES_PER_SAMPLE = 2 * BLOCK  # the tar headers of a sample and of its label

# A name inside the folder, because a manifest from an untrusted source must not refer to files
# outside it.
FileName = Annotated[str, Field(pattern=r"^[^/\\\p{Cc}\p{Zl}\p{Zp}]+$", max_length=255)]
SplitName = FileName  # it may become part of a file name
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClassFile(_Record):
    """A class list in a file of its own, as written by `ClassList.write`."""

    file: FileName
    num_classes: int = Field(gt=0, lt=2**31)
    sha256: Digest


def _class_list(value: Any, validate: Callable[[Any], Any]) -> ClassList:
    return value if isinstance(value, ClassList) else ClassList.of(validate(value))


class ShardInfo(_Record):
    file: FileName
    split: SplitName
    samples: int = Field(gt=0)
    bytes: int = Field(gt=0)
    sha256: Digest
    index_crc32: int = Field(
        ge=0, lt=2**32, description="checksum of the entries in the shard's index"
    )
    labels: int | None = Field(
        None, ge=0, description="number of labels of all samples, if each has a set of labels"
    )

    @model_validator(mode="after")
    def _samples_fit(self) -> "ShardInfo":
        # These numbers determine the maximum size of the index, so they must be bounded too.
        if self.samples * _MIN_BYTES_PER_SAMPLE > self.bytes:
            raise ValueError(f"{self.samples} samples do not fit in {self.bytes} bytes")
        if (self.labels or 0) > self.bytes:
            raise ValueError(f"{self.labels} labels do not fit in {self.bytes} bytes")
        return self

    @model_serializer(mode="wrap")
    def _without_none(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The manifest of samples with one label stays as earlier versions of kway wrote it.
        return {name: value for name, value in serialize(self).items() if value is not None}


class SourceInfo(_Record):
    """The source of the shards. Sources with equal descriptions produce identical bytes."""

    kind: str
    parameters: dict[str, str | int | float | bool | None] = {}

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v}' for k, v in self.parameters.items())})"


class Manifest(_Record):
    """The contents of a folder of shards. The label of a class is its position in `classes`.

    format_version: 3 if the classes are in a file, and 4 if the samples have sets of labels.
    """

    format_version: Literal[1, 3, 4] = 1
    modality: Literal["image", "text"] = Field(
        "image", description="modality of the samples; texts are stored as `<key>.txt` in UTF-8"
    )
    source: SourceInfo
    classes: Annotated[
        ClassList,
        GetPydanticSchema(lambda _, schema: schema(tuple[ClassInfo, ...])),
        WrapValidator(_class_list),
        PlainSerializer(lambda classes: [info.model_dump() for info in classes]),
    ]
    shards: tuple[ShardInfo, ...] = Field(min_length=1)
    label_vectors: FileName | None = None
    label_vectors_sha256: Digest | None = None
    incomplete: dict[FileName, str] = Field(
        {},
        description="for each shard with missing samples, why they are missing, as recorded by "
        "`kway shard index --skip-bad`",
    )
    class_file: ClassFile | None = Field(
        None, description="the file that contains `classes`, which are then omitted here"
    )

    @model_validator(mode="after")
    def _lists_are_valid(self) -> "Manifest":
        if not len(self.classes):
            raise ValueError("there are no classes")
        name, count = Counter(shard.file for shard in self.shards).most_common(1)[0]
        if count > 1:
            raise ValueError(f"shard {name!r} is listed twice")
        if (self.label_vectors is None) != (self.label_vectors_sha256 is None):
            raise ValueError("label_vectors and label_vectors_sha256 must be set together")
        if len({shard.labels is None for shard in self.shards}) > 1:
            raise ValueError("some samples have one label and others a set of labels")
        return self

    @property
    def label_sets(self) -> bool:
        """Whether each sample has a set of labels, possibly empty, instead of one label."""
        return self.shards[0].labels is not None

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, in the order in which they first occur in the shards."""
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def class_names(self) -> Strings:
        """The names of the classes. The label of a class is its position."""
        return self.classes.names

    def of_split(self, split: str, *, key: str | None = None) -> tuple[ShardInfo, ...]:
        """Return the shards of `split`. Raises ValueError if the split does not exist.

        key: the recipe key whose value is `split`, for the error message.
        """
        shards = tuple(shard for shard in self.shards if shard.split == split)
        if not shards and key is not None:
            raise ValueError(
                f"{key} is {split!r}, but the shards contain the splits {', '.join(self.splits)}: "
                f"set {key} to one of them"
            )
        if not shards:
            what = f"{key} is" if key is not None else "there is no split"
            raise ValueError(f"{what} {split!r}: choose from the splits {', '.join(self.splits)}")
        return shards

    def check_labeled(self, split: str) -> None:
        """Raise ValueError if the samples of `split` have sets of labels, and all are empty."""
        if self.label_sets and not any(shard.labels for shard in self.of_split(split)):
            labeled = sorted({shard.split for shard in self.shards if shard.labels})
            raise ValueError(
                f"no sample of split {split!r} has a label: choose from the splits "
                f"{', '.join(labeled)}, or write the shards again with the labels of {split!r}"
            )

    def digest(self, split: str) -> str:
        """Return 16 hexadecimal digits that identify this split's samples and their order."""
        return digest_of(self.of_split(split))

    @classmethod
    def load(cls, folder: Path | str, cache: CacheConfig = DEFAULT_CACHE) -> "Manifest":
        """Read `folder/manifest.json` and check that every shard exists and has its full size, and
        the SHA-256 of the class list.

        Files at a URL are checked when they are fetched. Raises FileNotFoundError if the manifest
        or a shard is missing; ValueError for damaged JSON, a newer format or a shard of the
        wrong size; and RetriesExhaustedError if the folder or the URL cannot be
        read.
        """
        manifest = cls.read(folder, cache)
        manifest.check_shards(folder)
        return manifest

    def check_shards(self, folder: Path | str) -> None:
        """Check that every shard exists and has its full size. Raises the errors of `load`."""
        if is_url(folder):
            return
        # Labels are positions in the class list, so another list of the same size would go
        # unnoticed. A list is small compared with the shards, which `kway shard verify` checks.
        about = self.class_file
        if about is not None and sha256_of(Path(folder) / about.file) != about.sha256:
            raise ValueError(
                f"{Path(folder) / about.file} is damaged or belongs to other shards (its SHA-256 "
                "does not match the manifest): copy it again or run kway shard again"
            )
        for shard in self.shards:
            path = Path(folder) / shard.file
            try:
                size = retried(str(path), path.stat).st_size
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"{path} is missing: copy it or run kway shard again"
                ) from None
            if size != shard.bytes:
                raise ValueError(
                    f"{path} has {size} bytes, but the manifest lists {shard.bytes}: copy it again "
                    "or run kway shard again"
                )

    @classmethod
    def read(cls, folder: Path | str, cache: CacheConfig = DEFAULT_CACHE) -> "Manifest":
        """Read the manifest without checking the shards."""
        folder = folder_or_url(str(folder))
        if isinstance(folder, Path) and not retried(str(folder), (folder / MANIFEST).is_file):
            raise FileNotFoundError(
                f"{folder / MANIFEST} is missing: run kway shard (again, if a run was "
                "interrupted), or copy the file if it was lost"
            )

        def open_classes(about: ClassFile) -> ClassList:
            opened = partial(ClassList.open, num_classes=about.num_classes)
            return read_mapped(folder, about.file, about.sha256, cache, opened)

        def parse(content: bytes) -> Manifest:
            return cls._parse(content, address(folder, MANIFEST), open_classes)

        return read_file(
            folder, MANIFEST, parse, attempts=cache.attempts, max_bytes=_MAX_MANIFEST_BYTES
        )

    @classmethod
    def _parse(
        cls, content: bytes, path: str, open_classes: Callable[[ClassFile], ClassList]
    ) -> "Manifest":
        remedy = "run kway shard again into an empty folder"
        if is_url(path):
            remedy = "upload it again from the machine on which the shards were created"
        try:
            head = ManifestHead.model_validate_json(content)
            if head.format_version > FORMAT_VERSION:
                raise ValueError(
                    f"{path} has format version {head.format_version}, but this version of kway "
                    f"reads versions up to {FORMAT_VERSION}: install a newer version of kway"
                )
            if head.format_version == 2:
                raise ValueError(
                    f"{path} is of an earlier version, which appended samples: write its class "
                    "names to a file, delete it, and run kway shard index --classes FILE"
                )
            if head.class_file is None:
                stored = _Stored.model_validate_json(content)
            else:
                tree = {**json.loads(content), "classes": open_classes(head.class_file)}
                stored = _Stored.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(f"{path} is damaged ({where}: {first['msg']}): {remedy}") from error
        manifest = cls.model_construct(**{name: getattr(stored, name) for name in cls.model_fields})
        if stored.checksum != manifest.fingerprint():
            raise ValueError(
                f"{path} is damaged or was edited (its checksum does not match): {remedy}"
            )
        return manifest

    def in_stored_form(self, write: Callable[[str, ClassList], str]) -> "Manifest":
        """Return the manifest as it is stored: with the format version of its content, and with its
        classes in a file if there are too many for the manifest.

        write: writes a class list to the file of this name, and returns its SHA-256.
        """
        changed: dict[str, Any] = {}
        if len(self.classes) > MAX_INLINE_CLASSES:
            sha256 = write(CLASSES, self.classes)
            about = ClassFile(file=CLASSES, num_classes=len(self.classes), sha256=sha256)
            changed = {"format_version": 3, "class_file": about}
        if self.label_sets:
            changed["format_version"] = 4
        return self.model_copy(update=changed) if changed else self

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`: the manifest and its checksum."""
        # Omit these keys if possible, so that earlier versions of kway can read the manifest.
        stored = _Stored(**dict(self), checksum=self.fingerprint())
        exclude = self._omitted() - {_VECTORS_DIGEST}
        return stored.model_dump_json(indent=1, exclude=exclude).encode() + b"\n"

    def fingerprint(self) -> str:
        """Return the SHA-256 of the manifest's values."""
        # Hash the values, not the file, so that JSON whitespace does not matter. Leaving out empty
        # values keeps the checksums of earlier manifests valid.
        values = self.model_dump(mode="json", exclude=self._omitted())
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def _omitted(self) -> set[str]:
        empty = {name for name in _ADDED_LATER if not getattr(self, name)}
        return empty if self.class_file is None else empty | {"classes"}


_VECTORS_DIGEST = "label_vectors_sha256"
_ADDED_LATER = (_VECTORS_DIGEST, "incomplete", "class_file")


class _Stored(Manifest):
    checksum: Digest


class ManifestHead(BaseModel):
    """What can be read of a manifest without its class file."""

    format_version: int
    source: SourceInfo
    class_file: ClassFile | None = None


def digest_of(shards: Iterable[ShardInfo]) -> str:
    """Return 16 hexadecimal digits that identify the samples of `shards` and their order."""
    content = "".join(f"{shard.samples} {shard.sha256}\n" for shard in shards)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
