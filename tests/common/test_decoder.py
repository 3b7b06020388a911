"""Tokens as text: the library tokenizers alone decodes as transformers does, or is not used."""

import json

import pytest

from rllib_srl.common.decoder import _without_transformers, decoder_of
from rllib_srl.engine.models import local_model
from tests.rollout.fakes import make_tokenizer


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m"])
def test_the_library_tokenizers_alone_decodes_as_transformers_does(model):
    from transformers import AutoTokenizer

    path = local_model(model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [*range(0, len(tokenizer), 7), *tokenizer.all_special_ids, *tokenizer.encode("Key: AKIAIOSFODNN7EXAMPLE")]
    alone = _without_transformers(path)
    assert alone.decode(ids, skip_special_tokens=False) == tokenizer.backend_tokenizer.decode(ids, False)
    assert decoder_of(path)(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_tokens_that_only_the_configuration_names_are_decoded_by_transformers(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert _without_transformers(tmp_path) is not None
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for change in (
        {"eos_token": "<over>"},
        {"extra_special_tokens": ["<look>"]},
        {"added_tokens_decoder": {str(len(tokenizer)): {"content": "<new>"}}},
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | change))
        assert _without_transformers(tmp_path) is None
    (tmp_path / "tokenizer.json").unlink()
    assert _without_transformers(tmp_path) is None
