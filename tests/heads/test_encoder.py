"""Vectors of class names from a transformers encoder: a tiny random model in a local folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from heads.tree.encoder import encode_names

NAMES = ["dog", "Egyptian_cat", "cat", "a cat and a dog and a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "dog", "cat", "Egyptian", "a", "and"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=7,
    )
    BertModel(config).save_pretrained(path)
    return path


def test_vectors_are_mean_hidden_states_independent_of_the_batch(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    for batch in (1, 3):
        vectors = encode_names(folder, NAMES, batch=batch)
        assert vectors.shape == (4, 8)
        assert vectors.dtype == np.float32
        for name, vector in zip(NAMES[:3], vectors[:3], strict=True):
            tokens = tokenizer(name.replace("_", " "), return_tensors="pt")
            with torch.no_grad():
                states = model.eval()(**tokens).last_hidden_state[0]
            assert vector == pytest.approx(states.mean(0).numpy(), abs=1e-6)


def test_a_folder_without_a_model_raises_a_one_line_error(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        encode_names(tmp_path, NAMES)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="cannot load encoder") as error:
        encode_names(tmp_path, NAMES)
    assert "\n" not in str(error.value)
