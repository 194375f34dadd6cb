"""Trains a WordPiece vocabulary from scratch with the tokenizers library.

Training is deterministic. `data/text/tokenizer_training.py` selects the texts and saves the
tokenizer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

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
