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

    The weights start at 1 or, with `idf`, at the inverse document frequencies of the training texts
    (`start_from`). The norm |a| keeps the scale of the features independent of the length of the
    text. The weights and vectors of n-grams are in tables of `buckets` rows, and the row of an
    n-gram is a hash of its token IDs.
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
        idf: Annotated[
            bool,
            Field(
                description="whether the weights start at the inverse document frequencies of the "
                "training texts"
            ),
        ] = False,
    ) -> None:
        super().__init__()
        self.idf = idf
        self.vocab_size, self.dim, self.ngrams, self.buckets = vocab_size, dim, ngrams, buckets
        num_rows = vocab_size + (ngrams - 1) * buckets
        self.vectors = nn.EmbeddingBag(num_rows, dim, mode="sum")
        self.weights = nn.Embedding(num_rows, 1)
        # Features of norm 1 in expectation.
        nn.init.normal_(self.vectors.weight, std=dim**-0.5)
        nn.init.ones_(self.weights.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the features [B, dim] of token IDs [B, T] where the mask is 1."""
        ids, present = self._rows(input_ids, attention_mask)
        weights = self.weights(ids).squeeze(-1) * present
        # A text that consists of padding has the features 0. The square root has no gradient at 0.
        norm = weights.square().sum(1, keepdim=True).clamp(min=1e-12).sqrt()
        return self.vectors(ids, per_sample_weights=weights / norm)

    def document_counts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the number of texts that contain each token or n-gram, int64 [rows]. Rows that
        n-grams share count the texts with any of them."""
        ids, present = self._rows(input_ids, attention_mask)
        num_rows = len(self.weights.weight)
        ids = ids.where(present.bool(), num_rows).sort(1).values
        is_first = F.pad(ids.diff(dim=1) > 0, (1, 0), value=True)
        return torch.bincount(ids[is_first], minlength=num_rows + 1)[:-1]

    @torch.no_grad()
    def start_from(self, document_counts: Tensor, num_texts: int) -> None:
        """Set the weight of a token that n of N texts contain to 1 + log((1 + N) / (1 + n)), as
        scikit-learn does, and that of tokens without a text, which training does not see, to 0."""
        weights = 1 + ((1 + num_texts) / (1 + document_counts.double())).log()
        self.weights.weight.copy_(weights.where(document_counts > 0, 0).unsqueeze(1))

    def _rows(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table rows of the tokens and n-grams of each text, and a mask of those that
        exist."""
        rows, masks = [input_ids], [attention_mask]
        hashed, mask = input_ids, attention_mask
        for length in range(2, self.ngrams + 1):
            # Position t has the n-gram that starts at t - length + 1, if there is one.
            hashed = hashed * _MULTIPLIER + _shifted(input_ids, length - 1)
            mask = mask * _shifted(attention_mask, length - 1)
            start = self.vocab_size + (length - 2) * self.buckets
            rows.append(start + hashed % self.buckets)
            masks.append(mask)
        return torch.cat(rows, 1), torch.cat(masks, 1)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Return the values [B, T] shifted to the right, with zeros at the start."""
    return F.pad(values, (by, 0))[:, : values.shape[1]]
