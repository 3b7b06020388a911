"""Settings of the memory: domains by all their names, and bad values."""

import pytest

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group, a_prompt


def test_domains_by_all_their_names():
    def drawn(domains):
        buffer = a_buffer(domains=domains)
        names = ("sums", "words", "maps")
        buffer.add([a_group(a_prompt(i, names[i // 4]), 1, i) for i in range(12)], 1)
        found = {p.domain for now in range(2, 6) for p in buffer.draw_prompts(4, now)}
        return found, {group.prompt.domain for now in range(2, 5) for group in buffer.draw_groups(4, now)}

    everywhere = {"sums", "words", "maps"}
    assert drawn("all") == (everywhere, everywhere)
    assert drawn("last") == ({"words"}, {"words"})  # the one before the newest
    assert drawn("earlier") == ({"sums", "words"}, everywhere)  # no prompt of the newest, which comes fresh
    assert drawn(["maps", "sums"]) == ({"maps", "sums"},) * 2
    assert drawn(["none"]) == (set(), set())


BAD = [  # what pydantic's types and limits do not check
    ("spacing", "never"),
    ("spacing_config", {"unknown": 1}),
    ("spacing_config", {"desired_retention": 2.0}),
    ("selection_config", {"temperature": -1.0}),
    ("domains", "newest"),
    ("domains", 3),
    ("admit", ["secrets", 3]),
    ("admit", f"{__name__}:BAD"),
    ("on_group", "growth"),
    ("local_directory", "relative/path"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_value_is_named(name, value):
    errors = ReplaySettings.errors({name: value})
    assert len(errors) == 1, errors
    assert errors[0].startswith(f"{name} = ") or name in errors[0]
    assert "expected" in errors[0]
    assert ReplaySettings.errors({name: value}, "replay_")[0].startswith("replay_")


def test_all_errors_are_named_at_once_before_anything_is_opened(tmp_path):
    with pytest.raises(ValueError) as caught:
        SRLReplayBuffer(directory=tmp_path / "new", capacity=-5, spacing="never", max_uses=0)
    assert all(name in str(caught.value) for name in ("capacity = -5", "spacing = 'never'", "max_uses = 0"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="capacity must be >= 1, got 0"):
        SRLReplayBuffer(capacity=0, revisit_fraction=0.0, retain=0.0)
