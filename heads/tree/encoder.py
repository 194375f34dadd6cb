"""Label vectors from class names by a transformers text encoder: its mean last hidden state.

Only folders on this machine, only safetensors, no code from the folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def encode_names(
    folder: str | Path,
    class_names: Sequence[str],
    *,
    batch: int = 64,
    device: "torch.device | str" = "cpu",
) -> NDArray[np.float32]:
    """Vectors float32 [K, hidden]: the encoder's last hidden states, averaged over a name's tokens.

    Underscores become spaces, names longer than the encoder's window are cut. Raises
    FileNotFoundError for a folder without a model, ValueError for one that no text encoder or
    tokenizer can be loaded from.
    """
    import torch

    tokenizer, encoder = _load(Path(folder))
    encoder.to(device).eval()
    names = [name.replace("_", " ") for name in class_names]
    # Names of like length go together, so that little is padding.
    order = sorted(range(len(names)), key=lambda i: len(names[i]))
    vectors = np.empty((len(names), encoder.config.hidden_size), np.float32)
    for start in range(0, len(names), batch):
        part = order[start : start + batch]
        tokens = tokenizer(
            [names[i] for i in part],
            padding=True,
            truncation=True,
            max_length=_window(tokenizer, encoder),
            return_tensors="pt",
        ).to(device)
        with torch.inference_mode():
            states_BTd = encoder(**tokens).last_hidden_state.float()
        mask_BT1 = tokens["attention_mask"].unsqueeze(2)
        means = (states_BTd * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
        vectors[part] = means.cpu().numpy()
    return vectors


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"encoder {folder} has no config.json: give a transformers folder")
    options = {"trust_remote_code": False, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        encoder = AutoModel.from_pretrained(folder, use_safetensors=True, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"encoder {folder} does not load: {reason}") from None
    if encoder.config.is_encoder_decoder:
        encoder = encoder.get_encoder()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None or "input_ids" not in tokenizer.model_input_names:
        raise ValueError(f"encoder {folder} takes no padded texts: give a text encoder")
    return tokenizer, encoder


def _window(tokenizer: Any, encoder: Any) -> int:
    """Tokens that fit both: a tokenizer that does not know says 10^30, and RoBERTa's positions
    start at 2."""
    positions = getattr(encoder.config, "max_position_embeddings", 512)
    return min(int(tokenizer.model_max_length), int(positions) - 2)
