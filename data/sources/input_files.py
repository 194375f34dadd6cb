"""Input files and folders of sources, which are local: the type of their fields, checks, and the
reasons why files in a folder of images are not read. Images are validated later.
"""

from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator

from data.remote.config import is_url

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})
NOT_AN_IMAGE = f"its name does not end in {', '.join(sorted(ENDINGS))}"
HIDDEN_FILE, HIDDEN_FOLDER = "hidden file", "hidden folder"


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


def is_image_name(name: str) -> bool:
    """Return whether a file has the extension of an image. `._a.jpg` is hidden and not an image."""
    return not name.startswith(".") and PurePosixPath(name).suffix.lower() in ENDINGS


def why_not_image(path: Path) -> str | None:
    """Return the reason to skip a file in a class folder, or None for an image."""
    if path.name.startswith("."):  # macOS writes .DS_Store and ._NAME
        return HIDDEN_FILE
    if not is_image_name(path.name):
        return NOT_AN_IMAGE
    return None if path.is_file() else not_file(path)


def not_file(path: Path) -> str:
    """Return the reason to skip a directory entry that is neither a file nor a folder."""
    return "broken symbolic link" if path.is_symlink() else "not a regular file"
