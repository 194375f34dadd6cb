"""Label vectors from class names: mean-pooled last hidden states of a transformers text encoder.

The encoder is loaded from a local folder with safetensors; no code in the folder is executed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Encode = Callable[[list[str]], Vectors]


def encode_names(
    folder: str | Path,
    class_names: Sequence[str],
    *,
    batch: int = 64,
    device: torch.device | str = "cpu",
    run: Callable[[Encode, Iterable[list[str]]], Iterator[Vectors]] = map,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Vectors:
    """Return float32 vectors [K, hidden]: last hidden states, averaged over each name's tokens.

    Underscores are replaced by spaces, and names longer than the encoder's maximum length are
    truncated. run: like `map`, but can compute the batches in other processes, which must be able
    to read `folder`. The result is the same. report: called with (names done, total).

    Raises FileNotFoundError if the folder does not contain a model, and ValueError if no text
    encoder or tokenizer can be loaded from it.
    """
    names = [name.replace("_", " ") for name in class_names]
    # Sort by length, so that the names of a batch need little padding.
    order = sorted(range(len(names)), key=lambda i: len(names[i]))
    batches = [order[start : start + batch] for start in range(0, len(names), batch)]
    encode = partial(_encode, Path(folder).absolute(), str(device), torch.get_num_threads())
    encoded = run(encode, ([names[i] for i in part] for part in batches))
    vectors, done = np.empty((len(names), 0), np.float32), 0
    report(0, len(names))
    for part, block in zip(batches, encoded, strict=True):
        if not done:
            vectors = np.empty((len(names), block.shape[1]), np.float32)
        vectors[part] = block
        done += len(part)
        report(done, len(names))
    _load.cache_clear()
    return vectors


def _encode(folder: Path, device: str, threads: int, names: list[str]) -> Vectors:
    torch.set_num_threads(threads)  # the number of threads affects the rounding of sums
    tokenizer, encoder = _load(folder, device)
    tokens = tokenizer(
        names,
        padding=True,
        truncation=True,
        max_length=_window(tokenizer, encoder),
        return_tensors="pt",
    ).to(device)
    with torch.inference_mode():
        states_BTd = encoder(**tokens).last_hidden_state.float()
    mask_BT1 = tokens["attention_mask"].unsqueeze(2)
    means = (states_BTd * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
    return means.cpu().numpy()


@lru_cache(maxsize=1)
def _load(folder: Path, device: str) -> tuple[Any, Any]:
    """Load the tokenizer and the encoder, once per process."""
    from transformers import AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"encoder {folder} has no config.json: pass the folder of a transformers model"
        )
    options = {"trust_remote_code": False, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        encoder = AutoModel.from_pretrained(folder, use_safetensors=True, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot load encoder {folder}: {reason}") from None
    if encoder.config.is_encoder_decoder:
        encoder = encoder.get_encoder()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None or "input_ids" not in tokenizer.model_input_names:
        raise ValueError(
            f"encoder {folder} does not support padding: pass the folder of a text encoder"
        )
    return tokenizer, encoder.to(device).eval()


def _window(tokenizer: Any, encoder: Any) -> int:
    """Return the maximum number of tokens for both the tokenizer and the encoder.

    A tokenizer without a limit has a model_max_length of 10^30. RoBERTa's positions start at 2, so
    two positions are subtracted for all encoders.
    """
    positions = getattr(encoder.config, "max_position_embeddings", 512)
    return min(int(tokenizer.model_max_length), int(positions) - 2)
