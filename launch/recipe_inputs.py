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
    comments, text = file.read_text(encoding="utf-8"), recipe.data.text
    inputs = {
        folder: (Path(folder) / MANIFEST, ("shard", "SOURCE"))
        for folder in recipe.data.addresses
        if not is_url(folder)
    }
    if text is not None and not text.tokenizer.startswith(HUB):
        inputs[text.tokenizer] = Path(text.tokenizer), ("tokenizer", str(recipe.data.shards))
    for folder, (path, words) in inputs.items():
        # Users copy the command to a shell, and the recipe may come from someone else. A command
        # with characters that could start another program is therefore not used.
        out, harmless = re.escape(shlex.quote(folder)), r"[\w .…/*,=+-]*"
        command = rf"^# +(kway (?:shard|tokenizer) {harmless}-o {out}(?: {harmless})?)$"
        found = re.search(command, comments, re.MULTILINE)
        yield path, found[1] if found else kway_command(*words, "-o", folder)


def check_inputs(recipe: Recipe, file: Path) -> None:
    """Raise FileNotFoundError with the commands to run if a local input is missing."""
    missing = [
        f"{path} does not exist: create it with {command}"
        for path, command in local_inputs(recipe, file)
        if not path.exists()
    ]
    if missing:
        raise FileNotFoundError("; ".join(missing))
