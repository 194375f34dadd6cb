"""The folder of a model to import: a local folder, or a snapshot of a model on the hub.

Only JSON, text and safetensors files are read. Pickles and code are not.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from data.messages import one_line

HUB = "hub:"
CONFIG = "config.json"
_WEIGHTS = "*.safetensors"
_READ = (_WEIGHTS, "*.json", "*.txt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Names of 1,000,000 classes take about 50 MB.
_MAX_TEXT_BYTES = 200 * 2**20
_GIB = 2**30


def open_source(source: str, *, max_gib: float) -> Path:
    """Return the folder of the model `source`: a folder, or `hub:NAME`, which is downloaded.

    Raises FileNotFoundError if there is no such model, and ValueError if it has no safetensors
    weights, or if its files are larger than `max_gib` (weights) or 200 MiB (each other file).
    """
    if source.startswith(HUB):
        folder = _downloaded(source.removeprefix(HUB), max_gib)
    else:
        folder = Path(source)
        if folder.is_file():
            raise ValueError(_not_a_folder(folder))
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{source} is not a folder: pass a folder with {CONFIG} and {_WEIGHTS}, or "
                f"{HUB}{source} for a model on the hub"
            )
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    _check_files(source, files, max_gib)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            f"{source} has no {CONFIG}: pass the folder of a transformers or timm model"
        )
    return folder


def _check_files(source: str, files: dict[str, int], max_gib: float) -> None:
    """Check the names and sizes of a model's files. Raises ValueError as `open_source` does."""
    weights = {name: size for name, size in files.items() if Path(name).match(_WEIGHTS)}
    if not weights:
        pickles = [name for name in files if _is_pickle(name)]
        if pickles:
            name = source.removeprefix(HUB)
            raise ValueError(
                f"{source} has only {pickles[0]}, a pickle, which kway does not read: convert it "
                'with `python -c "import transformers as t; '
                f"n = '{name}'; m = getattr(t, t.AutoConfig.from_pretrained(n).architectures[0]); "
                "m.from_pretrained(n).save_pretrained('converted')\"`, and copy the other files"
            )
        raise ValueError(
            f"{source} has no {_WEIGHTS} file: save the model with save_pretrained and pass its "
            "folder"
        )
    total = sum(weights.values())
    if total > max_gib * _GIB:
        raise ValueError(
            f"the weights of {source} have {total / _GIB:.1f} GiB, over the limit of {max_gib:g}: "
            "raise --max-gib if the model fits in memory"
        )
    for name, size in files.items():
        if any(Path(name).match(kind) for kind in _READ[1:]) and size > _MAX_TEXT_BYTES:
            raise ValueError(
                f"{name} of {source} has {size:,} bytes, over the limit of {_MAX_TEXT_BYTES:,}: "
                "remove the file if the model does not need it"
            )


def _is_pickle(name: str) -> bool:
    return any(Path(name).match(kind) for kind in _PICKLES)


def _not_a_folder(file: Path) -> str:
    if _is_pickle(file.name):
        return (
            f"{file} is a pickle, which kway does not read: save the model with save_pretrained "
            "(transformers) or timm.models.save_for_hf (timm, with safe_serialization=True), and "
            "pass the folder"
        )
    return f"{file} is a file: pass the folder that contains it and {CONFIG}"


def _downloaded(name: str, max_gib: float) -> Path:
    try:
        listed = snapshot_download(name, dry_run=True, ignore_patterns=["*/*"])
        _check_files(
            f"{HUB}{name}", {file.filename: file.file_size or 0 for file in listed}, max_gib
        )
        return Path(snapshot_download(name, allow_patterns=list(_READ), ignore_patterns=["*/*"]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{HUB}{name} was not found on the hub, or the hub cannot be reached "
            f"({one_line(error)}): check the name, or download the model and pass its folder"
        ) from error
