"""Input files and folders of sources, which are local: the type of their fields, and checks."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from data.remote.config import is_url


def _local(given: Any) -> Any:
    """Raise ValueError for a URL other than `file://`, whose path is returned."""
    if not is_url(given):
        return given
    scheme, _, path = given.partition("://")
    if scheme != "file":
        raise ValueError(
            f"{given} is a URL, but sources read local files: copy the files first (such as with "
            "aws s3 sync, gcloud storage rsync or curl), or mount the bucket"
        )
    return Path(path)


Input = Annotated[Path, BeforeValidator(_local)]


def check_folder(path: Path, remedy: str) -> None:
    """Raise FileNotFoundError if `path` is not a folder."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder: {remedy}")


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Return bytes [offset, offset + size) of a file, or fewer at its end."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)
