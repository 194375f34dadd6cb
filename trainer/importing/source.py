"""The folder of a model to import: a local folder, or a snapshot of a model on the hub.

Only JSON, text and safetensors files are read. Pickles and code are not.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from data.messages import one_line

HUB = "hub:"
_CONFIG, _WEIGHTS = "config.json", "*.safetensors"


def open_source(source: str) -> Path:
    """Return the folder of the model `source`: a folder, or `hub:NAME`, which is downloaded.

    Raises FileNotFoundError if there is no such model, and ValueError if it has no configuration or
    no safetensors weights.
    """
    name, folder = source.removeprefix(HUB), Path(source)
    if source.startswith(HUB):
        patterns = [_WEIGHTS, "*.json", "*.txt"]
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
        except (OSError, HfHubHTTPError, HFValidationError) as error:
            raise FileNotFoundError(
                f"{source} was not found on the hub, or the hub cannot be reached "
                f"({one_line(error)}): check the name, or download the model and pass its folder"
            ) from error
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{source} is not a folder: pass a folder with {_CONFIG} and {_WEIGHTS}, or "
            f"{HUB}{source} for a model on the hub"
        )
    for needed in (_CONFIG, _WEIGHTS):
        if not any(folder.glob(needed)):
            convert = (
                'python -c "import transformers as t; '
                f"n = '{name}'; m = getattr(t, t.AutoConfig.from_pretrained(n).architectures[0]); "
                "m.from_pretrained(n).save_pretrained('converted')\""
            )
            raise ValueError(
                f"{source} has no {needed}: save the model with save_pretrained (transformers) or "
                "timm.models.save_for_hf (timm, with safe_serialization=True). kway does not read "
                f"pickles; convert those of transformers with `{convert}`, and copy the other files"
            )
    return folder
