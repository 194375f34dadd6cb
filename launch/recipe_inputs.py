"""The local folders that a recipe reads, and the commands that create them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from data.messages import kway_command
from data.remote.config import is_url
from data.shards.manifest import MANIFEST
from data.text.tokenizer import HUB
from trainer.config import Recipe


def local_inputs(recipe: Recipe, file: Path) -> Iterator[tuple[Path, str]]:
    """Yield the recipe's manifests, unless at a URL, and its tokenizer, unless on the hub, with
    the commands that create them.

    The commands come from the comments of the recipe's `file`. By default, they are `kway shard
    SOURCE` and `kway tokenizer` with the recipe's shards.
    """
    comments = file.read_text(encoding="utf-8")
    for address in recipe.data.addresses:
        if not is_url(address):
            command = _command_in(comments, address) or kway_command(
                "shard", "SOURCE", "-o", address
            )
            yield Path(address) / MANIFEST, command
    text = recipe.data.text
    if text is not None and not text.tokenizer.startswith(HUB):
        command = _command_in(comments, text.tokenizer) or kway_command(
            "tokenizer", recipe.data.shards, "-o", text.tokenizer
        )
        yield Path(text.tokenizer), command


def check_inputs(recipe: Recipe, file: Path) -> None:
    """Raise FileNotFoundError with the commands to run if a local input is missing."""
    missing = [
        f"{path} does not exist: create it with {command}"
        for path, command in local_inputs(recipe, file)
        if not path.exists()
    ]
    if missing:
        raise FileNotFoundError("; ".join(missing))


def _command_in(comments: str, folder: str) -> str | None:
    """Return the command in a recipe's comments that writes to `folder`.

    Users copy it to a shell, and the recipe may come from someone else. A command with characters
    that could start another program is therefore not used.
    """
    out, harmless = re.escape(shlex.quote(folder)), r"[\w .…/*,=+-]*"
    command = rf"^# +(kway (?:shard|tokenizer) {harmless}-o {out}(?: {harmless})?)$"
    found = re.search(command, comments, re.MULTILINE)
    return found[1] if found else None
