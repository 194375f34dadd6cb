"""The folder of a model to import: a local folder, or a snapshot of a model on the hub.

Only JSON, text and safetensors files are read. Pickles and code are not.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from data.messages import one_line

HUB = "hub:"
_CONFIG, _WEIGHTS = "config.json", ".safetensors"
_TEXTS = (".json", ".txt")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Names of 1,000,000 classes take about 50 MB.
_MAX_TEXT_BYTES = 200 * 2**20
_GIB = 2**30


def open_source(source: str, *, max_gib: float) -> Path:
    """Return the folder of the model `source`: a folder, or `hub:NAME`, which is downloaded.

    Raises FileNotFoundError if there is no such model, and ValueError if it has no safetensors
    weights, or if its files are larger than `max_gib` (weights) or 200 MiB (each other file).
    """
    if source.startswith(HUB):
        return _downloaded(source, max_gib)
    folder = Path(source)
    if folder.is_file() and folder.suffix in _PICKLES:
        raise ValueError(
            f"{folder} is a pickle, which kway does not read: save the model with save_pretrained "
            "(transformers) or timm.models.save_for_hf (timm, with safe_serialization=True), and "
            "pass the folder"
        )
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{source} is not a folder: pass a folder with {_CONFIG} and *{_WEIGHTS}, or "
            f"{HUB}{source} for a model on the hub"
        )
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    _check_files(source, files, max_gib)
    return folder


def _downloaded(source: str, max_gib: float) -> Path:
    name = source.removeprefix(HUB)
    try:
        listed = snapshot_download(name, dry_run=True, ignore_patterns=["*/*"])
        _check_files(source, {each.filename: each.file_size or 0 for each in listed}, max_gib)
        patterns = [f"*{suffix}" for suffix in (_WEIGHTS, *_TEXTS)]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{source} was not found on the hub, or the hub cannot be reached "
            f"({one_line(error)}): check the name, or download the model and pass its folder"
        ) from error


def _check_files(source: str, files: dict[str, int], max_gib: float) -> None:
    """Check the names and sizes of a model's files. Raises ValueError as `open_source` does."""
    weights = [size for name, size in files.items() if name.endswith(_WEIGHTS)]
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if pickles and not weights:
        name = source.removeprefix(HUB)
        raise ValueError(
            f"{source} has only {pickles[0]}, a pickle, which kway does not read: convert it "
            'with `python -c "import transformers as t; '
            f"n = '{name}'; m = getattr(t, t.AutoConfig.from_pretrained(n).architectures[0]); "
            "m.from_pretrained(n).save_pretrained('converted')\"`, and copy the other files"
        )
    if not weights or _CONFIG not in files:
        raise ValueError(
            f"{source} has no {_CONFIG if weights else f'*{_WEIGHTS} file'}: save the model with "
            "save_pretrained and pass its folder"
        )
    if sum(weights) > max_gib * _GIB:
        raise ValueError(
            f"the weights of {source} have {sum(weights) / _GIB:.1f} GiB, over the limit of "
            f"{max_gib:g}: raise --max-gib if the model fits in memory"
        )
    for name, size in files.items():
        if name.endswith(_TEXTS) and size > _MAX_TEXT_BYTES:
            raise ValueError(
                f"{name} of {source} has {size:,} bytes, over the limit of {_MAX_TEXT_BYTES:,}: "
                "remove the file if the model does not need it"
            )
