"""Whether a backbone reads texts as kway needs it, asked of itself in one small forward pass."""

from itertools import cycle, islice

import torch
from torch import Tensor

from trainer.backbone.backbone import Backbone

_WIDTH = 8
# Of the features' norm, above rounding. A random BERT has 2e-3 and more at its first token.
_SAME = 1e-5
# Of what two texts differ by. Backbones that obey the mask have 0, those that do not 3e-4 and more.
_UNSEEN = 1e-4


def check_reading(backbone: Backbone, *, pad_id: int, places: int | None) -> None:
    """Raise ValueError where the features of texts that differ behind the first token are the same,
    or depend on what stands under the padding.

    places: positions of the backbone, where they are limited. Modes and torch's random state stay
    as they are.
    """
    width = min(_WIDTH, places or _WIDTH)
    if width < 4:  # no room for two tokens and two of padding
        return
    kind = backbone.architecture
    try:
        text, padded_otherwise, other = _features(backbone, pad_id, width)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the backbone {kind} does not run on tokens and a mask ({reason}): choose another"
        ) from error
    differ = (text - other).norm()
    if differ <= _SAME * text.norm():
        mean = backbone.pooling == "mean"
        remedy = "choose another backbone" if mean else "use backbone.pooling=mean"
        raise ValueError(
            f"the backbone {kind} is causal, or blind: texts that begin alike have the same "
            f"features by pooling {backbone.pooling}; {remedy}"
        )
    if (text - padded_otherwise).norm() > max(_UNSEEN * differ, _SAME * text.norm()):
        raise ValueError(
            f"the backbone {kind} ignores the attention mask, so that a text's features would "
            "depend on the texts beside it: choose another backbone"
        )


@torch.no_grad()
def _features(backbone: Backbone, pad_id: int, width: int) -> Tensor:
    """Of a text, of the same with other tokens under its padding, and of another text: [3, dim].

    All in one batch of one shape, so that what is equal is so to the last bit, on a GPU, too.
    """
    device = next(backbone.parameters()).device
    num_padding = width // 2
    num_tokens = width - num_padding
    # From the end of the vocabulary: special tokens, at its beginning, may have special effects.
    usable = [i for i in reversed(range(backbone.settings.vocab_size)) if i != pad_id][: 3 * width]
    ids = list(islice(cycle(usable), 3 * width))
    text, other = ids[:num_tokens], [ids[0], *ids[width : width + num_tokens - 1]]
    padding = [pad_id] * num_padding
    # The first of the padding stays: MobileBERT's last token sees the next one, which is zero there
    # as it is where a text ends.
    unlike = [pad_id, *ids[1 - num_padding :]]
    rows = [text + padding, text + unlike, other + padding]
    mask = [[1] * num_tokens + [0] * num_padding] * 3
    modes = [(part, part.training) for part in backbone.modules()]
    backbone.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return backbone(
                {
                    "input_ids": torch.tensor(rows, device=device),
                    "attention_mask": torch.tensor(mask, device=device),
                }
            ).float()
    finally:
        for part, mode in modes:
            part.training = mode
