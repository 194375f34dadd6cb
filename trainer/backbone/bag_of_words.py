"""A bag of words: the features of a text are a weighted sum of the vectors of its tokens.

The order of the tokens matters only within n-grams. The forward pass reads one row of a table per
token or n-gram; the backward pass and the optimizer write all rows.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

# A prime, so that the n-grams of consecutive IDs are spread over the buckets.
_MULTIPLIER = 1_000_003


class BagOfWords(nn.Module):
    """Computes features [B, dim] of texts: sum_t a_t v_t / |a|, where token t has a learned vector
    v_t and a learned weight a_t (fastText: Joulin et al. 2017, with weights).

    The weights start at 1 and play the role of inverse document frequencies. The norm |a| keeps the
    scale of the features independent of the length of the text. The weights and vectors of n-grams
    are in tables of `buckets` rows, and the row of an n-gram is a hash of its token IDs.
    """

    def __init__(
        self,
        vocab_size: Annotated[int, Field(gt=0, description="number of tokens")],
        dim: Annotated[int, Field(gt=0, description="number of features")] = 256,
        ngrams: Annotated[
            int, Field(ge=1, le=5, description="longest sequence of tokens with a vector")
        ] = 1,
        buckets: Annotated[
            int, Field(gt=0, description="number of rows that the n-grams of each length share")
        ] = 1 << 18,
    ) -> None:
        super().__init__()
        self.vocab_size, self.dim, self.ngrams, self.buckets = vocab_size, dim, ngrams, buckets
        num_rows = vocab_size + (ngrams - 1) * buckets
        self.vectors = nn.EmbeddingBag(num_rows, dim, mode="sum")
        self.weights = nn.Embedding(num_rows, 1)
        # Features of norm 1 in expectation.
        nn.init.normal_(self.vectors.weight, std=dim**-0.5)
        nn.init.ones_(self.weights.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the features [B, dim] of token IDs [B, T] where the mask is 1."""
        rows, masks = [input_ids], [attention_mask]
        hashed, mask = input_ids, attention_mask
        for length in range(2, self.ngrams + 1):
            # Position t has the n-gram that starts at t - length + 1, if there is one.
            hashed = hashed * _MULTIPLIER + _shifted(input_ids, length - 1)
            mask = mask * _shifted(attention_mask, length - 1)
            start = self.vocab_size + (length - 2) * self.buckets
            rows.append(start + hashed % self.buckets)
            masks.append(mask)
        ids, present = torch.cat(rows, 1), torch.cat(masks, 1)
        weights = self.weights(ids).squeeze(-1) * present
        # A text that consists of padding has the features 0. The square root has no gradient at 0.
        norm = weights.square().sum(1, keepdim=True).clamp(min=1e-12).sqrt()
        return self.vectors(ids, per_sample_weights=weights / norm)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Return the values [B, T] shifted to the right, with zeros at the start."""
    return F.pad(values, (by, 0))[:, : values.shape[1]]
