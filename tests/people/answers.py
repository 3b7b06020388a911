"""Answers by hand for tests of ratings."""

from rllib_srl.people.rating import Answer


def an_answer(number: int = 3, episode: int = 0, iteration: int = 12, **fields: object) -> Answer:
    """Return an answer of prompt `number`; the default's id is "12.3/0"."""
    values = {
        "group_id": f"{iteration}.{number}", "episode": episode, "key": f"{number:016x}",
        "fingerprint": f"{iteration}{number}{episode}".zfill(16), "env_id": "env", "domain": "sums",
        "version": iteration - 1, "prompt": f"What is {number} + 1?", "answer": f" {number + 1}\n",
    }  # fmt: skip
    return Answer(**{**values, **fields})  # type: ignore[arg-type]
