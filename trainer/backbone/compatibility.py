"""Whether shards, tokenizer and model fit together, said before anything is trained or exported."""

from data.shards.manifest import Manifest
from data.text.tokenizer import Tokenizer, open_tokenizer
from trainer.backbone.backbone import Backbone
from trainer.backbone.text_inputs import check_reading
from trainer.checkpoints import Checkpoint
from trainer.config import Recipe


def check_modality(recipe: Recipe, manifest: Manifest, backbone: Backbone) -> None:
    """Raise ValueError where a model of pictures gets texts or the reverse, where tokens have
    no embedding or no position or another padding, and where `check_reading` does."""
    if manifest.modality != backbone.modality:
        held, read = (
            "texts" if modality == "text" else "pictures"
            for modality in (manifest.modality, backbone.modality)
        )
        raise ValueError(
            f"{recipe.data.shards} holds {held} and the backbone reads {read}: choose other shards "
            "or another backbone"
        )
    text = recipe.data.text
    if manifest.modality != "text" or text is None:
        return
    tokenizer = open_tokenizer(text.tokenizer, max_length=text.max_length)
    padding_row, places = _positions(backbone)
    _check_tokens(text.tokenizer, tokenizer, backbone, padding_row)
    if places is not None and text.max_length > places:
        raise ValueError(
            f"data.text.max_length is {text.max_length} and the backbone has {places} "
            "positions: lower it"
        )
    check_reading(backbone, pad_id=tokenizer.pad_id, places=places)


def _positions(backbone: Backbone) -> tuple[int | None, int | None]:
    """Which padding token id positions are counted past, and how many tokens a text may have; None
    where there is no such thing."""
    for name, part in backbone.encoder.named_modules():
        # RoBERTa and its kin count positions from behind the padding token's id.
        row = getattr(part, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and row is not None:
            return row, len(part.weight) - row - 1
    places = getattr(backbone.settings, "max_position_embeddings", None)
    return None, places if places is not None and places > 0 else None  # XLNet says -1


def _check_tokens(
    name: str, tokenizer: Tokenizer, backbone: Backbone, padding_row: int | None
) -> None:
    config = backbone.settings
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"tokenizer {name} has {tokenizer.vocab_size} tokens and the backbone "
            f"embeddings for {config.vocab_size}: set backbone.config.vocab_size to "
            f"{tokenizer.vocab_size} or more, or choose the tokenizer that belongs to the backbone"
        )
    # The embedding of the backbone's padding is never trained.
    pad_id = tokenizer.pad_id
    stated = getattr(config, "pad_token_id", None)
    if stated is not None and stated != pad_id:
        raise ValueError(
            f"tokenizer {name} pads with token {pad_id} and the backbone with {stated}: set "
            f"backbone.config.pad_token_id={pad_id}, or choose the tokenizer that belongs to the "
            "backbone"
        )
    if padding_row is not None and padding_row != pad_id:  # MPNet's stands in its code
        raise ValueError(
            f"tokenizer {name} pads with token {pad_id} and the backbone {backbone.architecture} "
            f"with {padding_row}, whatever its configuration: choose another of the two"
        )


def tokenizer_digest(recipe: Recipe) -> str | None:
    """Tells the recipe's tokenizer from any other; None where it has none."""
    text = recipe.data.text
    if text is None:
        return None
    return open_tokenizer(text.tokenizer, max_length=text.max_length).digest()


def check_tokenizer(checkpoint: Checkpoint, digest: str | None) -> None:
    """Raise ValueError where the run's tokenizer has become another since the checkpoint."""
    if checkpoint.state["tokenizer"] != digest:
        raise ValueError(
            f"checkpoint {checkpoint.folder} was trained with another tokenizer than "
            "data.text.tokenizer names now: bring that one back, or start another run folder"
        )
