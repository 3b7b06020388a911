"""What is measured of a served model: by hand, from real stores, and through the gateway."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rllib_srl.cli.serving.figures import NEWEST, Meter, percentile, prometheus_text
from tests.cli.serving.small_engine import run


def test_percentiles_by_hand():
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.51, 0.95, 1.0)] == [1, 2, 3, 4, 4]


def test_a_meter_knows_the_newest_answers():
    meter = Meter()
    assert meter.figures() == {"num": 0, "latency_p50_s": None, "latency_p95_s": None, "tokens_per_s": None}
    meter.note(100.0, 1)
    for _ in range(NEWEST):
        meter.note(0.5, 10)
    assert meter.figures() == {"num": NEWEST + 1, "latency_p50_s": 0.5, "latency_p95_s": 0.5, "tokens_per_s": 20.0}


def test_prometheus_reads_what_is_known():
    figures = {"answers": {"num": 2, "latency_p50_s": None}, "ratings": {"rewards": {"0": 3, "1": 5}}}
    families = text_string_to_metric_families(prometheus_text(figures).decode())
    found = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert found == {("srl_answers_num",): 2, ("srl_ratings_rewards", "0"): 3, ("srl_ratings_rewards", "1"): 5}


def test_a_server_says_what_it_has_measured(tmp_path):
    async def body(parts):
        names = [(await parts.ask()).json()["id"] for _ in range(3)]
        async with parts.stream() as reply:
            await reply.aread()
        for name, value in zip(names, ("good", "bad", "none"), strict=True):
            await parts.rate(name, rating=value)
        stores = parts.stores
        verdicts = [{"gate": "kept", "outcome": "passed"}, {"gate": "drift", "outcome": "bad"}]

        def train():
            for uses in ({"a/0": "good"}, {"b/0": "bad", "a/0": "good"}):
                number = stores.lineage.begin(uses, {}).number
                stores.lineage.finish(number, {}, {"verdicts": verdicts})
                stores.lineage.activate(number)

        await stores.run(train)
        found = (await parts.send("GET", "/v1/figures")).json()
        answers = found["answers"]
        assert answers["num"] == 4 and 0 < answers["latency_p50_s"] <= answers["latency_p95_s"]
        assert answers["tokens_per_s"] > 0
        assert found["ratings"] == {"num": 2, "in_last_hour": 2, "rewards": {"0": 1, "1": 1}}
        assert found["versions"] == {
            "active": 2, "states": {"superseded": 1, "active": 1}, "ratings_until": {"1": 1, "2": 2},
            "gates": {"kept passed": 2, "drift bad": 2},
        }  # fmt: skip
        text = (await parts.send("GET", "/metrics")).text
        assert 'srl_versions_ratings_until{of="2"} 2.0' in text and "srl_answers_num 4.0" in text
        for path in ("/v1/figures", "/metrics"):
            assert (await parts.client.get(path)).status_code == 401

    run(tmp_path, body)


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_at_least_the_share_of_values_is_no_larger(share):
    values = [float(one) for one in range(37)]
    found = percentile(values, share)
    assert sum(one <= found for one in values) >= share * 37 > sum(one < found for one in values)
