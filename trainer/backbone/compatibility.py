"""Checks that shards, tokenizer and backbone are compatible, before training or export.

One small forward pass checks whether a backbone processes texts as kway requires.
"""

from itertools import cycle, islice

import torch
from torch import nn

from data.messages import one_line
from data.shards.manifest import Manifest
from data.text.tokenizer import Tokenizer
from trainer.backbone.backbone import Backbone, is_transformers
from trainer.checkpoints import Checkpoint
from trainer.config import Recipe

_NUM_TEST_TOKENS = 8
# A bound relative to the norm of the features, well above rounding error. With a randomly
# initialized BERT and pooling cls, the features of the two texts differ by at least 2e-3.
_EQUAL_TOLERANCE = 1e-5
# A bound relative to the difference between two texts. The value is 0 for backbones that respect
# the mask, and at least 3e-4 for those that do not.
_MASK_TOLERANCE = 1e-4


def check_modality(
    recipe: Recipe, manifest: Manifest, tokenizer: Tokenizer | None, backbone: Backbone
) -> None:
    """Raise ValueError if the shards contain texts but the backbone processes images, or vice
    versa; if a token has no embedding or no position; if the padding tokens differ; or if the
    backbone does not read the whole text or reads the padding. The backbone is then in evaluation
    mode.
    """
    if manifest.modality != backbone.modality:
        stored, read = (
            "texts" if modality == "text" else "images"
            for modality in (manifest.modality, backbone.modality)
        )
        raise ValueError(
            f"{recipe.data.shards} contains {stored}, but the backbone processes {read}: choose "
            "other shards or another backbone"
        )
    text = recipe.data.text
    if manifest.modality != "text" or text is None or tokenizer is None:
        return
    padding_row, num_positions = positions_of(backbone.encoder)
    _check_tokens(text.tokenizer, tokenizer, backbone, padding_row)
    if num_positions is not None and text.max_length > num_positions:
        raise ValueError(
            f"data.text.max_length is {text.max_length}, but the backbone has {num_positions} "
            "positions: lower data.text.max_length"
        )
    _check_reading(backbone, pad_id=tokenizer.pad_id, num_positions=num_positions)


def positions_of(encoder: nn.Module) -> tuple[int | None, int | None]:
    """Return the padding token ID, if position numbers start after it, and the maximum number of
    tokens. Each is None if the encoder does not define it.
    """
    for name, part in encoder.named_modules():
        # RoBERTa and related models number positions starting at the padding token's ID + 1.
        row = getattr(part, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and row is not None:
            return row, len(part.weight) - row - 1
    settings = encoder.config if is_transformers(encoder) else encoder
    num_positions = getattr(settings, "max_position_embeddings", None)
    # XLNet uses -1 for unlimited.
    return None, num_positions if num_positions is not None and num_positions > 0 else None


def _check_tokens(
    name: str, tokenizer: Tokenizer, backbone: Backbone, padding_row: int | None
) -> None:
    config = backbone.settings
    if tokenizer.vocab_size > config.vocab_size:
        key = "config.vocab_size" if is_transformers(backbone.encoder) else "vocab_size"
        raise ValueError(
            f"tokenizer {name} has {tokenizer.vocab_size} tokens, but the backbone has embeddings "
            f"for {config.vocab_size}: set backbone.{key} to {tokenizer.vocab_size} or more, "
            "or choose the backbone's own tokenizer"
        )
    # The embedding of the backbone's padding token is never trained.
    pad_id = tokenizer.pad_id
    stated = getattr(config, "pad_token_id", None)
    if stated is not None and stated != pad_id:
        raise ValueError(
            f"tokenizer {name} pads with token {pad_id}, but the backbone pads with {stated}: set "
            f"backbone.config.pad_token_id={pad_id} or choose the backbone's own tokenizer"
        )
    if padding_row is not None and padding_row != pad_id:  # hard-coded in MPNet
        raise ValueError(
            f"tokenizer {name} pads with token {pad_id}, but backbone {backbone.architecture} "
            f"always pads with {padding_row}: choose another tokenizer or backbone"
        )


def check_checkpoint(checkpoint: Checkpoint, *, tree: str, tokenizer: str | None) -> None:
    """Raise ValueError if the run's tokenizer or label tree, of which these are the digests, has
    changed since the checkpoint."""
    if checkpoint.state["tokenizer"] != tokenizer:
        raise ValueError(
            f"checkpoint {checkpoint.folder} was trained with a different tokenizer than "
            "data.text.tokenizer: restore the tokenizer or use a new run folder"
        )
    if checkpoint.state["tree"] != tree:
        raise ValueError(
            f"checkpoint {checkpoint.folder} has a different label tree, because its shards "
            "contained different classes or label vectors: restore those shards, or use a new run "
            "folder"
        )


@torch.no_grad()
def _check_reading(backbone: Backbone, *, pad_id: int, num_positions: int | None) -> None:
    """Raise ValueError if texts that differ only after the first token have the same features, or
    if features depend on the tokens in the padding. Leaves the backbone in evaluation mode.
    """
    half = min(_NUM_TEST_TOKENS, num_positions or _NUM_TEST_TOKENS) // 2
    if half < 2:  # too short for two tokens and two padding tokens
        return
    # Take tokens from the end of the vocabulary, because a model may treat the special tokens at
    # the beginning differently.
    usable = [i for i in reversed(range(backbone.settings.vocab_size)) if i != pad_id]
    ids = list(islice(cycle(usable[: 3 * half]), 3 * half))
    text, other, padding = ids[:half], [ids[0], *ids[half : 2 * half - 1]], [pad_id] * half
    # Keep the first padding token: in MobileBERT, the embedding of each token includes the
    # embedding of the next token, so the last token of a text legitimately depends on the first
    # padding token.
    other_padding = [pad_id, *ids[1 - half :]]
    # All three texts are in one batch, so that equal features are bitwise equal, even on a GPU.
    device = next(backbone.parameters()).device
    rows = torch.tensor([text + padding, text + other_padding, other + padding], device=device)
    mask = torch.tensor([[1] * half + [0] * half] * 3, device=device)
    kind = backbone.architecture
    try:
        inputs = {"input_ids": rows, "attention_mask": mask}
        features, padded_differently, different = backbone.eval()(inputs).float()
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"backbone {kind} cannot process tokens and a mask ({one_line(error)}): choose another "
            "backbone"
        ) from error
    differ = (features - different).norm()
    if differ <= _EQUAL_TOLERANCE * features.norm():
        mean = backbone.pooling == "mean"
        fix = "choose another backbone" if mean else "use backbone.pooling=mean"
        raise ValueError(
            f"backbone {kind} either is causal or ignores its input, because texts with the same "
            f"first token have the same features with pooling {backbone.pooling}: {fix}"
        )
    if (features - padded_differently).norm() > max(
        _MASK_TOLERANCE * differ, _EQUAL_TOLERANCE * features.norm()
    ):
        raise ValueError(
            f"backbone {kind} ignores the attention mask, so the features of a text would depend "
            "on the other texts in the batch: choose another backbone"
        )
