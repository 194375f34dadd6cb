"""Trains a WordPiece vocabulary from scratch with the tokenizers library.

Training is deterministic. `data/text/tokenizer_training.py` selects the texts and saves the
tokenizer.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

PAD, UNKNOWN, FIRST, LAST, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROLES = dict(
    zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
)
_PREFIX = "##"
_MIN_FREQUENCY = 2
_ALPHABET_SHARE = 4  # the alphabet is at most a quarter of the vocabulary
# The maximum length of a word; longer words become unknown tokens. In languages without spaces, a
# sentence is one word.
_MAX_WORD_CHARS = 300
_LONG_RUN = re.compile(rf"(?:^|[ \t\n\r])[^ \t\n\r]{{{_MAX_WORD_CHARS + 1}}}")


def train_wordpiece(
    texts: Callable[[], Iterable[str]],
    *,
    vocab_size: int = 30_000,
    lowercase: bool = False,
) -> tokenizers.Tokenizer:
    """Train a tokenizer that splits words as BERT's does, but keeps accents.

    texts: a function that is called twice and returns the same texts both times. The most frequent
    characters are kept, up to a quarter of the vocabulary size. A word that contains any other
    character becomes an unknown token. Raises ValueError if there are no texts or the characters
    do not fit in the vocabulary.
    """

    def usable() -> Iterator[str]:
        return _without_long_words(texts(), lowercase)

    counts = Counter[str]()

    def counted() -> Iterator[str]:
        for text in usable():
            counts.update(text)
            yield text

    pieces = _learn(counted(), vocab_size=1, lowercase=lowercase).get_vocab()
    limit = max(1, vocab_size // _ALPHABET_SHARE)
    chars = _most_frequent(counts, _normalizer(lowercase), limit)
    # The trainer numbers single-character pieces in hash-table order, which varies between
    # runs, and resolves ties between equally frequent pairs in favor of the lower number.
    # Listing these pieces as special tokens fixes their numbers.
    chars = sorted(char for char in chars if char in pieces)
    single = chars + [_PREFIX + char for char in chars if _PREFIX + char in pieces]
    if not single:
        raise ValueError("the shards contain no text to train on: choose other shards")
    if (needed := len(SPECIAL) + len(single)) > vocab_size:
        raise ValueError(
            f"--vocab-size is {vocab_size}, but an alphabet of {len(chars)} characters "
            f"requires {needed}: raise it"
        )
    learned = _learn(
        usable(),
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *single],
        initial_alphabet=chars,
        limit_alphabet=len(chars),
        lowercase=lowercase,
    )
    return _finished(learned.get_vocab(), lowercase)


def _learn(texts: Iterable[str], *, lowercase: bool, **options: Any) -> tokenizers.Tokenizer:
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    learner.normalizer = _normalizer(lowercase)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        min_frequency=_MIN_FREQUENCY,
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
        **options,
    )
    learner.train_from_iterator(texts, trainer)
    return learner


def _finished(vocabulary: dict[str, int], lowercase: bool) -> tokenizers.Tokenizer:
    """Build a tokenizer without the special tokens that were added for training."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            vocabulary,
            unk_token=UNKNOWN,
            continuing_subword_prefix=_PREFIX,
            max_input_chars_per_word=_MAX_WORD_CHARS,
        )
    )
    tokenizer.normalizer = _normalizer(lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {LAST}",
        special_tokens=[(token, vocabulary[token]) for token in (FIRST, LAST)],
    )
    tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    return tokenizer


def _normalizer(lowercase: bool) -> normalizers.BertNormalizer:
    """Return BERT's normalizer, except that it keeps accents and marks.

    It removes control characters and separates Chinese characters into words.
    """
    return normalizers.BertNormalizer(strip_accents=False, lowercase=lowercase)


def _without_long_words(texts: Iterable[str], lowercase: bool) -> Iterator[str]:
    """Remove words that are too long to tokenize.

    The trainer's time and memory are quadratic in the length of a word.
    """
    normalizer, cutter = _normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    for text in texts:
        if _LONG_RUN.search(text):
            words = cutter.pre_tokenize_str(normalizer.normalize_str(text))
            yield " ".join(word for word, _ in words if len(word) <= _MAX_WORD_CHARS)
        else:
            yield text


def _most_frequent(
    counts: Counter[str], normalizer: normalizers.BertNormalizer, limit: int
) -> list[str]:
    """Return up to `limit` characters after normalization, most frequent first."""
    total = Counter[str]()
    for char, count in counts.items():
        for normal in normalizer.normalize_str(char):
            if not normal.isspace():
                total[normal] += count
    return sorted(total, key=lambda char: (-total[char], char))[:limit]
