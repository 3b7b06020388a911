"""The sentence encoder against its own definition."""

import numpy as np
import pytest

from rllib_srl.contrib.sentence import SentenceEncoder
from rllib_srl.replay.diversity.embedders import normalised
from tests.replay.test_embedding import group_of


@pytest.fixture(scope="module")
def minilm() -> SentenceEncoder:
    pytest.importorskip("transformers")
    try:
        return SentenceEncoder()
    except ValueError as error:
        pytest.skip(str(error))


def test_sentences_of_like_meaning_are_near(minilm):
    vectors = minilm.encode(["A cat sits on the mat.", "There is a cat on a rug.", "Multiply 3 by 7.", ""])
    assert vectors.shape[1] == 384
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1, 0], abs=1e-5)
    assert vectors[0] @ vectors[1] > 0.6 > 0.3 > vectors[0] @ vectors[2]


def test_a_sentence_is_the_mean_of_its_hidden_states_whatever_it_is_batched_with(minilm):
    import torch
    from transformers import AutoModel, AutoTokenizer

    directory = minilm.directory
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModel.from_pretrained(directory).eval()
    texts = ["12, 40 or 93?", "b", "a much longer question than the others, so that they are padded"]
    with torch.inference_mode():
        alone = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for text in texts]
    vectors = minilm.encode([*texts, texts[0]])
    assert vectors[:3] == pytest.approx(normalised(np.array(alone)), abs=1e-4)
    assert np.array_equal(vectors[3], vectors[0])


def test_groups_are_decoded_with_the_policys_tokenizer(minilm, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["[UNK]", "which", "number", "cat", "dog", "yes", "no"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]").save_pretrained(tmp_path)
    groups = [group_of([1, 2, 3], [[[5]], [[6]]]), group_of([1, 2, 4], [[[5, 6]], [[]]])]
    encoder = SentenceEncoder()
    encoder.model_dir = tmp_path
    vectors = encoder.embed(groups)
    assert vectors == pytest.approx(minilm.encode(["cat", "dog"]), abs=1e-4)
    with pytest.raises(ValueError, match="model_dir = None; expected the directory"):
        minilm.embed(groups)
