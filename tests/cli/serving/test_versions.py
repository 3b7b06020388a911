"""`srl versions --rollback`: what it says about the ratings that are withdrawn."""

from __future__ import annotations

import pytest

from rllib_srl.cli.serving.place import Place, Stores
from rllib_srl.cli.serving.versions import main
from tests.cli.served_model import FIXED

MANY = {f"c{number}/0": "good" for number in range(8)}


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        ({"c0/0": "good"}, "0 ratings are withdrawn"),  # its parent has used it, too
        ({"c0/0": "bad"}, "1 rating is withdrawn: c0/0"),
        (MANY, "7 ratings are withdrawn: c1/0, c2/0, c3/0, c4/0, c5/0 and 2 more"),
    ],
)
def test_a_rollback_names_the_first_few_ratings_that_it_withdraws(tmp_path, capsys, uses, said):
    place = Place(tmp_path / "served")
    place.settle(FIXED)
    stores = Stores(place)

    def fill():
        for used in ({"c0/0": "good"}, {"x/0": "good"}, uses):
            number = stores.lineage.begin(used, {}).number
            stores.lineage.finish(number, {}, {})
            stores.lineage.activate(number)
            if number == 2:
                stores.lineage.roll_back("an earlier rollback, which is not counted again")

    stores.now(fill)
    stores.close()
    assert main([str(place.directory), "--rollback"]) == 0
    assert capsys.readouterr().out == f"version 3 was rolled back; version 1 is active; {said}\n"
