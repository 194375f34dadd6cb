"""Which entries of a folder are image files, and why the others are not read.

Image files are not opened here; they are validated later.
"""

from pathlib import Path, PurePosixPath

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})
NOT_AN_IMAGE = f"its name does not end in {', '.join(sorted(ENDINGS))}"
HIDDEN_FILE, HIDDEN_FOLDER = "hidden file", "hidden folder"


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
