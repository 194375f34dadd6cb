"""Implements `kway tokenizer`, which trains a WordPiece vocabulary on one split of text shards with
the tokenizers library, and evaluates it. Training is deterministic.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from data.files import explained, published_folder
from data.loading.order import permuted_index
from data.messages import Report, silent
from data.shards.manifest import Manifest
from data.shards.split import BadSampleError, Split, open_split
from data.skipped import Skipped
from data.text.tokenizer import Tokenizer

PAD, UNKNOWN, FIRST, LAST, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROLES = dict(
    zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
)
_PREFIX = "##"
_MIN_FREQUENCY = 2
_ALPHABET_SHARE = 4  # the alphabet is at most a quarter of the vocabulary
# The maximum length of a word; longer words become unknown tokens, and training ignores them,
# because its time and memory are quadratic in the length of a word. In languages without spaces, a
# sentence is one word.
_MAX_WORD_CHARS = 300
_REPEATED = 1000
# The default for BERT in transformers. Recipes and bundles set their own value.
_MAX_LENGTH = 512
_HELD_OUT_SHARE, _MAX_HELD_OUT = 20, 10_000


@dataclass(frozen=True)
class TrainedTokenizer:
    """The result of training a tokenizer on `texts` texts.

    unknown: the fraction of unknown tokens. tokens_per_text: the mean number of tokens per text,
    not counting special tokens. Both are measured on `held_out` texts that were not used for
    training. problems: the skipped samples.
    """

    vocab_size: int
    texts: int
    held_out: int
    unknown: float
    tokens_per_text: float
    problems: list[Skipped]


def train_tokenizer(
    shards: Path | str,
    out: Path,
    *,
    split: str = "train",
    vocab_size: int = 30_000,
    max_texts: int = 2_000_000,
    lowercase: bool = False,
    report: Report = silent,
) -> TrainedTokenizer:
    """Train a WordPiece tokenizer on text shards and write it atomically to `out`.

    shards: a path or URL. One in every 20 texts is held out for evaluation, up to 10,000 texts in
    total. max_texts: the maximum number of training texts, which are chosen by a fixed permutation.
    The same shards and options produce identical bytes. Unreadable samples are skipped.

    Before samples are read, raises ValueError for image shards, for too few texts or if `out`
    exists, and OSError if `out` cannot be written. Also raises the errors of `train_wordpiece`.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} already exists: choose another folder, or delete it")
    if Manifest.load(shards).modality != "text":
        raise ValueError(f"{shards} contains images: kway tokenizer requires texts")
    with published_folder(out, replace=False) as folder, open_split(shards, split) as opened:
        num = len(opened)
        if num < 2:
            raise ValueError(f"split {split!r} has {num} text(s): at least 2 are required")
        num_held = max(1, min(num // _HELD_OUT_SHARE, _MAX_HELD_OUT))
        indices = permuted_index(0, 0, np.arange(min(num, num_held + max_texts)), num)
        # Sort the indices, because disks read consecutive samples faster.
        held, training = (np.sort(part).tolist() for part in np.split(indices, [num_held]))
        problems = list[Skipped]()
        texts = list(_texts(opened, held, problems))
        if not texts:
            raise ValueError(
                f"{shards}: all texts reserved for evaluation are unreadable: copy the shards again"
            )
        done = 0

        def read() -> Iterator[str]:
            nonlocal done
            for text in _texts(opened, training, problems):
                done += 1
                report(done, len(training))
                yield text

        backend = train_wordpiece(read(), vocab_size=vocab_size, lowercase=lowercase)
        measured = _measured(backend, texts, done, problems)  # of whole texts, without truncation
        tokenizer = Tokenizer.of(backend, ROLES, max_length=_MAX_LENGTH, name=str(out))
        with explained(out):
            tokenizer.save(folder)
    return measured


def _texts(split: Split, indices: list[int], problems: list[Skipped]) -> Iterator[str]:
    """Yield texts of a split. Unreadable ones are added to `problems`."""
    for index in indices:
        try:
            yield split.text(index)[0]
        except BadSampleError as error:
            problems.append(Skipped(f"text {index}", str(error)))


def _measured(
    backend: tokenizers.Tokenizer, texts: list[str], num_trained: int, problems: list[Skipped]
) -> TrainedTokenizer:
    tokens, unknown = 0, 0
    for text in texts:
        encoding = backend.encode(text, add_special_tokens=False)
        tokens += len(encoding.ids)
        unknown += encoding.tokens.count(UNKNOWN)
    return TrainedTokenizer(
        vocab_size=backend.get_vocab_size(),
        texts=num_trained,
        held_out=len(texts),
        unknown=unknown / max(1, tokens),
        tokens_per_text=tokens / len(texts),
        problems=problems,
    )


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int = 30_000, lowercase: bool = False
) -> tokenizers.Tokenizer:
    """Train a tokenizer that splits words as BERT's does, but keeps accents.

    The most frequent characters are kept, up to a quarter of the vocabulary size. A word that
    contains any other character becomes an unknown token. Raises ValueError if there are no texts.
    """
    # As BERT's, this removes control characters and separates Chinese characters into words.
    normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=lowercase)
    cutter = pre_tokenizers.BertPreTokenizer()
    words = Counter[str]()
    for text in texts:
        found = cutter.pre_tokenize_str(normalizer.normalize_str(text))
        words.update(word for word, _ in found if len(word) <= _MAX_WORD_CHARS)
    counts = Counter[str]()
    for word, count in words.items():
        for char in word:
            counts[char] += count
    limit = max(1, vocab_size // _ALPHABET_SHARE)
    chars = sorted(sorted(counts, key=lambda char: (-counts[char], char))[:limit])
    later = {char for word in words for char in word[1:]}
    # The trainer numbers single-character pieces in hash-table order, which varies between runs,
    # and resolves ties between equally frequent pairs in favor of the lower number. Listing these
    # pieces as special tokens fixes their numbers.
    single = chars + [_PREFIX + char for char in chars if char in later]
    if not single:
        raise ValueError("the shards contain no text to train on: choose other shards")
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    learner.normalizer, learner.pre_tokenizer = normalizer, cutter
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[*SPECIAL, *single],
        initial_alphabet=chars,
        limit_alphabet=len(chars),
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(_repeated(words), trainer)
    # The special tokens that were added for training are not those of the tokenizer.
    vocabulary = learner.get_vocab()
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            vocabulary,
            unk_token=UNKNOWN,
            continuing_subword_prefix=_PREFIX,
            max_input_chars_per_word=_MAX_WORD_CHARS,
        )
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, cutter
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {LAST}",
        special_tokens=[(token, vocabulary[token]) for token in (FIRST, LAST)],
    )
    tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    return tokenizer


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Yield texts in which each word occurs as often as in the input."""
    for word, count in words.items():
        for start in range(0, count, _REPEATED):
            yield f"{word} " * min(_REPEATED, count - start)
