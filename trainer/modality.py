"""Whether shards, tokenizer and model fit together, said before anything is trained or exported."""

from data.shards.manifest import Manifest
from data.tokens.tokenizer import open_tokenizer
from trainer.backbone import Backbone
from trainer.checkpoint import Checkpoint
from trainer.config import Recipe


def check_modality(recipe: Recipe, manifest: Manifest, backbone: Backbone) -> None:
    """Raise ValueError where a model of pictures gets texts or the reverse, or where tokens have
    no embedding."""
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
    config = backbone.settings
    tokenizer = open_tokenizer(text.tokenizer, max_length=text.max_length)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"tokenizer {text.tokenizer} has {tokenizer.vocab_size} tokens and the backbone "
            f"embeddings for {config.vocab_size}: set backbone.config.vocab_size to "
            f"{tokenizer.vocab_size} or more, or choose the tokenizer that belongs to the backbone"
        )
    places = getattr(config, "max_position_embeddings", None)
    # RoBERTa and its kin count positions from behind the padding token's id.
    used = config.pad_token_id + 1 if "roberta" in config.model_type else 0
    if places is not None and text.max_length > places - used:
        raise ValueError(
            f"data.text.max_length is {text.max_length} and the backbone has {places - used} "
            "positions: lower it"
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
