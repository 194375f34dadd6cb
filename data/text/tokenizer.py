"""Maps texts to token IDs with a fast tokenizer from a folder or the hub, without remote code.

Batching and padding are implemented in `data/loading/inputs.py`. `data/text/tokenizer_training.py`
trains vocabularies.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from data.files import commit
from data.hub import must_use_cache, offline_advice
from data.messages import kway_command, one_line

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# For these classes, transformers uses tokenizer.json unchanged. For other classes, it rebuilds
# parts of the tokenizer.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
HUB = "hub:"
_REMEDY = f"use another folder or {HUB}NAME, or train one with kway tokenizer SHARDS -o DIR"
# A private-use character, which normalizers may delete, and a cuneiform sign.
_UNKNOWN = "\ue000 \U00012000"


@dataclass
class Tokenizer:
    """An opened tokenizer. Create one with `open_tokenizer` or `Tokenizer.of`.

    It is thread-safe, picklable and fork-safe. Forked processes share the memory of its backend.

    pad_id: the ID of the padding token. vocab_size: the largest ID + 1, which is the required
    number of embedding rows. max_length: the maximum number of tokens per text, including special
    tokens. truncation_side: the side of a longer text from which tokens are removed.
    """

    max_length: int
    pad_id: int
    vocab_size: int
    truncation_side: str
    # Truncates texts to `max_length` minus the length of `_special`.
    _backend: tokenizers.Tokenizer = field(repr=False)
    # The backend without truncation, in JSON.
    _content: str = field(repr=False)
    _roles: dict[str, str] = field(repr=False)
    # The IDs that are added before and after each text, or None to let the library add them.
    _special: tuple[list[int], list[int]] | None = field(repr=False)

    @classmethod
    def of(
        cls,
        backend: tokenizers.Tokenizer,
        roles: Mapping[str, str],
        *,
        max_length: int,
        name: str,
        truncation_side: str = "right",
    ) -> "Tokenizer":
        """Wrap a tokenizer from the tokenizers library. `backend` is changed to truncate texts, and
        must not be changed afterwards.

        roles: the special tokens, such as {"pad_token": "[PAD]"}. Raises ValueError, with `name`,
        if there is no pad token, if encoding an unknown character fails, if `truncation_side` is
        neither left nor right, or if `max_length` leaves no room for tokens of the text.
        """
        if truncation_side not in ("left", "right"):
            raise ValueError(
                f"tokenizer {name} has the truncation_side {truncation_side!r}: set it to left or "
                f"right in its {CONFIG_FILE}"
            )
        pad_id = backend.token_to_id(roles.get("pad_token", ""))
        if pad_id is None:
            raise ValueError(
                f"tokenizer {name} does not define a pad token: set pad_token in its {CONFIG_FILE} "
                "to one of its tokens, or choose another tokenizer"
            )
        num_special = backend.num_special_tokens_to_add(is_pair=False)
        if max_length <= num_special:
            raise ValueError(
                f"max_length is {max_length}, but tokenizer {name} adds {num_special} special "
                f"tokens to each text: set it to {num_special + 1} or more"
            )
        backend.no_padding()
        backend.no_truncation()
        # `save` and `pickle` omit this property, which transformers may set.
        backend.encode_special_tokens = False
        try:
            backend.encode(_UNKNOWN)
        except Exception as error:  # the library raises no narrower type
            raise ValueError(
                f"tokenizer {name} cannot encode unknown characters ({one_line(error)}): add an "
                f"unknown token to its model, or {_REMEDY}"
            ) from error
        content, special = backend.to_str(), _special_ids(backend)
        before, after = special or ([], [])
        backend.enable_truncation(max_length - len(before) - len(after), direction=truncation_side)
        # The library's threads do not survive a fork, and a child that uses them hangs. Loader
        # processes and concurrent requests provide parallelism, so threads are disabled.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return cls(
            max_length=max_length,
            pad_id=pad_id,
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
            truncation_side=truncation_side,
            _backend=backend,
            _content=content,
            _roles={role: roles[role] for role in _ROLES if role in roles},
            _special=special,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token IDs of each text, with special tokens, truncated to `max_length`.

        A list is never empty: a text without tokens becomes one pad token if the tokenizer does not
        add special tokens. Raises ValueError for text with an unpaired surrogate, and if the
        tokenizer fails.
        """
        try:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=self._special is None
            )
        except TypeError as error:
            raise ValueError(_not_unicode(texts)) from error
        except Exception as error:  # the library raises no narrower type
            raise ValueError(
                f"the tokenizer cannot encode a text ({one_line(error)}): choose another tokenizer"
            ) from error
        before, after = self._special or ([], [])
        return [before + encoding.ids + after or [self.pad_id] for encoding in encodings]

    def save(self, folder: Path) -> None:
        """Write files to `folder` that `open_tokenizer` and AutoTokenizer can load.

        The folder is created if it does not exist.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": _PLAIN_CLASSES[0],
            "model_max_length": self.max_length,
            **self._roles,
        }
        if self.truncation_side != "right":
            config["truncation_side"] = self.truncation_side
        text = json.dumps(config, ensure_ascii=False, indent=1) + "\n"
        for name, content in ((TOKENIZER_FILE, self._content), (CONFIG_FILE, text)):
            commit(folder / name, content.encode())

    def digest(self) -> str:
        """Return a SHA-256 of everything that determines a text's IDs, except `max_length`."""
        # Nothing is added for the right side, so that the digests of earlier versions stay valid.
        side = "" if self.truncation_side == "right" else f"{self.truncation_side}\n"
        return hashlib.sha256(f"{side}{self.pad_id}\n{self._content}".encode()).hexdigest()


def _special_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the IDs of the special tokens before and after each text.

    Adding them here instead of in the library saves a tenth of the time of encoding. Returns None
    if they cannot be told apart from the tokens of the text.
    """
    encoded, text = (
        backend.encode(_UNKNOWN, add_special_tokens=added).ids for added in (True, False)
    )
    length = len(text)
    starts = [
        start
        for start in range(len(encoded) - length + 1)
        if encoded[start : start + length] == text
    ]
    if len(starts) != 1 or not text:
        return None
    return encoded[: starts[0]], encoded[starts[0] + length :]


def open_tokenizer(name: str, *, max_length: int) -> Tokenizer:
    """Open the tokenizer in folder `name`, or `hub:NAME`.

    Texts are truncated to `max_length` tokens. Without `hub:`, the hub is not contacted. Raises
    FileNotFoundError if the folder does not exist, ValueError if it is damaged or not a fast
    tokenizer, and the errors of `Tokenizer.of`.
    """
    folder = Path(name)
    if name.startswith(HUB):
        source = name.removeprefix(HUB)
        if Path(source).exists():  # transformers would open the local path instead
            raise ValueError(f"tokenizer {name}: {source} is a local file or folder: remove {HUB}")
        opened = _of_transformers(source, name=name)
    elif not folder.is_dir():
        raise FileNotFoundError(
            f"tokenizer {name} is not a folder: train one with "
            f"{kway_command('tokenizer', 'SHARDS', '-o', name)}, or use {HUB}{name} for a "
            "tokenizer on the hub"
        )
    else:
        opened = _of_files(folder) or _of_transformers(name, name=name)
    backend, roles, side = opened
    return Tokenizer.of(backend, roles, max_length=max_length, name=name, truncation_side=side)


# The backend, the special tokens by role, and the truncation side.
_Opened = tuple[tokenizers.Tokenizer, dict[str, str], str]


def _of_files(folder: Path) -> _Opened | None:
    """Load a tokenizer without transformers, whose import takes seconds.

    Returns None if transformers is needed. A folder that contains a model's config.json is one such
    case, because the file may name a different tokenizer class.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise _damaged(str(folder / CONFIG_FILE), error) from error
    if not isinstance(config, dict):
        raise _damaged(str(folder / CONFIG_FILE), "it is not a JSON object")
    plain = config.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in config
    file = folder / TOKENIZER_FILE
    if not plain or not file.is_file() or (folder / "config.json").exists():
        return None
    # A token may also be an object with options.
    tokens = {role: config[role] for role in _ROLES if config.get(role) is not None}
    roles = {
        role: str(one.get("content") if isinstance(one, dict) else one)
        for role, one in tokens.items()
    }
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises no narrower type
        raise _damaged(str(file), error) from error
    # As in transformers, the truncation stored in tokenizer.json provides the default.
    default = (backend.truncation or {}).get("direction", "right")
    return backend, roles, str(config.get("truncation_side", default)).lower()


def _of_transformers(source: str, *, name: str) -> _Opened:
    """Load a tokenizer from a folder or the hub with transformers. `name` is used in error
    messages.
    """
    from transformers import AutoTokenizer

    is_offline = must_use_cache(source)
    try:
        found = AutoTokenizer.from_pretrained(
            source, use_fast=True, trust_remote_code=False, local_files_only=is_offline
        )
    except Exception as error:  # transformers raises arbitrary errors for damaged files
        remedy = offline_advice(source, "data.text.tokenizer=") if is_offline else _REMEDY
        raise ValueError(
            f"tokenizer {name} cannot be opened ({one_line(error)}): {remedy}"
        ) from error
    if not getattr(found, "is_fast", False):
        raise ValueError(
            f"tokenizer {name} is not a fast tokenizer ({type(found).__name__}): {_REMEDY}"
        )
    tokens = {role: getattr(found, role, None) for role in _ROLES}
    roles = {role: str(token) for role, token in tokens.items() if token is not None}
    return found.backend_tokenizer, roles, found.truncation_side


def _damaged(file: str, reason: object) -> ValueError:
    return ValueError(
        f"{file} is damaged ({one_line(reason)}): copy it again, or run kway tokenizer again"
    )


def _not_unicode(texts: Sequence[str]) -> str:
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return (
                f"text {index} is not valid Unicode: it contains an unpaired surrogate at "
                f"character {error.start}"
            )
    return "a text is not a string"
