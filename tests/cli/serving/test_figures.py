"""What is measured of a served model: by hand, from a real store, and through the gateway."""

from rllib_srl.cli.serving.figures import NEWEST, Meter, percentile
from tests.cli.serving.small_engine import gateway


def test_percentiles_by_hand():
    assert percentile([], 0.5) is None
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.25, 0.5, 0.51, 0.95, 1.0)] == [1, 2, 3, 4, 4]


def test_a_meter_knows_the_newest_answers():
    meter = Meter()
    assert meter.figures() == {"num": 0, "latency_p50_s": None, "latency_p95_s": None, "tokens_per_s": None}
    meter.note(100.0, 1)
    for _ in range(NEWEST):
        meter.note(0.5, 10)
    assert meter.figures() == {"num": NEWEST + 1, "latency_p50_s": 0.5, "latency_p95_s": 0.5, "tokens_per_s": 20.0}


@gateway()
async def test_a_server_says_what_it_has_measured(parts):
    names = [(await parts.ask()).json()["id"] for _ in range(3)]
    async with parts.stream() as reply:
        await reply.aread()
    for name, value in zip(names, ("good", "bad", "none"), strict=True):
        await parts.rate(name, rating=value)
    store = parts.db.store
    verdicts = [{"gate": "kept", "is_passed": True}, {"gate": "drift", "is_passed": False}]

    def train():
        for uses in ({"a/0": "good"}, {"b/0": "bad", "a/0": "good"}):
            number = store.begin(uses, {}).number
            store.finish(number, {}, {"verdicts": verdicts})
            store.activate(number)

    await parts.db.run(train)
    found = (await parts.send("GET", "/v1/figures")).json()
    answers = found["answers"]
    assert answers["num"] == 4 and 0 < answers["latency_p50_s"] <= answers["latency_p95_s"]
    assert answers["tokens_per_s"] > 0
    assert found["ratings"] == {"num": 2, "in_last_hour": 2, "rewards": {"0": 1, "1": 1}}
    assert found["versions"] == {
        "active": 2, "states": {"superseded": 1, "active": 1}, "ratings_until": {"1": 1, "2": 2},
        "gates": {"kept passed": 2, "drift failed": 2},
    }  # fmt: skip
    text = (await parts.send("GET", "/metrics")).text
    assert 'srl_versions_ratings_until{of="2"} 2.0' in text and "srl_answers_num 4.0" in text
