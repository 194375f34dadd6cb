"""Whether the Hugging Face Hub can be reached, and what its cache contains.

transformers retries requests to such a hub for up to a minute, even if its cache has the files.
"""

from pathlib import Path

_TIMEOUT_SECONDS = 10


def must_use_cache(name: str) -> bool:
    """Return whether `name` is a model of the hub, not a path, and the hub cannot be reached. Pass
    the result to `from_pretrained` as `local_files_only`.
    """
    import httpx
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if Path(name).is_dir():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    if is_offline_mode():
        return True
    try:
        httpx.head(HfApi().endpoint, timeout=_TIMEOUT_SECONDS)
    except httpx.TransportError:
        return True
    return False


def has_cached_weights(name: str) -> bool:
    """Return whether the hub's cache contains safetensors weights of the model `name`."""
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    files = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def offline_advice(name: str, key: str) -> str:
    """Return what to do if the hub cannot be reached and the cache does not contain `name`."""
    return (
        "the hub cannot be reached, and its cache does not contain the files: on a machine with "
        f"network access, run `hf download {name} --local-dir FOLDER`, copy the folder to this "
        f"machine, and set {key}FOLDER"
    )
