"""The retail environment on a tiny shop: each tool's effect by hand, grading by the database, and what must be told."""

import copy
import gzip
import importlib.util
import json

import pytest

from rllib_srl.envs.shop.database import Shop
from rllib_srl.envs.shop.retail import Retail, retail_data
from rllib_srl.envs.tools.calls import CallError

ADDRESS = {"address1": "1 Elm St", "address2": "", "city": "Oslo", "country": "NO", "state": "OS", "zip": "0150"}
NEW_ADDRESS = {**ADDRESS, "address1": "9 Oak St", "zip": "0250"}


def variant(item_id, price, available=True, **options):
    return {"item_id": item_id, "price": price, "available": available, "options": options}


def item(item_id, product_id, price, **options):
    return {"item_id": item_id, "product_id": product_id, "price": price, "options": options, "name": product_id}


def order(order_id, status, *items, paid_with="card_1"):
    payment = {"transaction_type": "payment", "amount": sum(one["price"] for one in items)}
    return {
        "order_id": order_id, "user_id": "ann_1", "address": dict(ADDRESS), "items": list(items), "status": status,
        "payment_history": [{**payment, "payment_method_id": paid_with}],
    }  # fmt: skip


DATABASE = {
    "products": {
        "hat": {"name": "Hat", "product_id": "hat", "variants": {
            "h1": variant("h1", 10.0, size="S"), "h2": variant("h2", 12.5, size="M"),
            "h3": variant("h3", 9.0, available=False, size="L"), "h4": variant("h4", 10.0, size="XL"),
        }},
        "bag": {"name": "Bag", "product_id": "bag", "variants": {
            "b1": variant("b1", 40.0, colour="red"), "b2": variant("b2", 35.0, colour="blue"),
        }},
    },
    "users": {
        "ann_1": {
            "user_id": "ann_1", "name": {"first_name": "Ann", "last_name": "Lee"}, "address": dict(ADDRESS),
            "email": "Ann@example.com", "orders": ["#W1", "#W2", "#W3", "#W4"],
            "payment_methods": {
                "card_1": {"source": "credit_card", "id": "card_1"},
                "gift_1": {"source": "gift_card", "id": "gift_1", "balance": 20.0},
            },
        }
    },
    "orders": {
        "#W1": order("#W1", "pending", item("h1", "hat", 10.0), item("b1", "bag", 40.0)),
        "#W2": order("#W2", "delivered", item("h1", "hat", 10.0), item("h1", "hat", 10.0)),
        "#W3": order("#W3", "cancelled", item("h1", "hat", 10.0)),
        "#W4": order("#W4", "pending", item("h1", "hat", 10.0), paid_with="gift_1"),
    },
}  # fmt: skip


def test_looking_changes_nothing():
    shop = Shop(DATABASE)
    assert shop.find_user_id_by_email("ann@EXAMPLE.com") == "ann_1"
    assert shop.find_user_id_by_name_zip("ann", "LEE", "0150") == "ann_1"
    assert shop.get_order_details("#W1") == DATABASE["orders"]["#W1"]
    assert shop.list_all_product_types() == {"Hat": "hat", "Bag": "bag"}
    assert shop.calculate("(10 + 2.5) * 2") == "25.0"
    assert shop.changes() == {}


WHERE = ("9 Oak St", "", "Oslo", "OS", "NO", "0250")
# a call, and what it leaves in an order or in the user
EFFECTS = [
    ("cancel_pending_order", ("#W4", "no longer needed"), {
        "status": "cancelled", "cancel_reason": "no longer needed",
        "payment_history": [*DATABASE["orders"]["#W4"]["payment_history"],
                            {"transaction_type": "refund", "amount": 10.0, "payment_method_id": "gift_1"}],
        "balance": 30.0,
    }),
    ("modify_pending_order_items", ("#W1", ["h1", "b1"], ["h2", "b2"], "gift_1"), {  # 2.5 more for the hat, 5 less
        "status": "pending (item modified)", "balance": 22.5, "items": [
            {**item("h2", "hat", 12.5, size="M")}, {**item("b2", "bag", 35.0, colour="blue")},
        ],
        "payment_history": [*DATABASE["orders"]["#W1"]["payment_history"],
                            {"transaction_type": "refund", "amount": 2.5, "payment_method_id": "gift_1"}],
    }),
    ("return_delivered_order_items", ("#W2", ["h1", "h1"], "card_1"),
     {"status": "return requested", "return_items": ["h1", "h1"]}),
    ("exchange_delivered_order_items", ("#W2", ["h1"], ["h2"], "gift_1"),
     {"status": "exchange requested", "exchange_price_difference": 2.5}),
    ("modify_pending_order_address", ("#W1", *WHERE), {"address": NEW_ADDRESS}),
    ("modify_user_address", ("ann_1", *WHERE), {"address": NEW_ADDRESS}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "left"), EFFECTS)
def test_each_tool_changes_what_it_says_and_the_database_stays(name, args, left):
    before, shop = copy.deepcopy(DATABASE), Shop(DATABASE)
    getattr(shop, name)(*args)
    changes = shop.changes()
    found = dict(changes.get(("orders", args[0]), {}))
    user = changes.get(("users", "ann_1"), {"payment_methods": {"gift_1": {}}})
    found = {**user, **found, **user["payment_methods"]["gift_1"]}
    assert {field: found[field] for field in left} == left
    assert before == DATABASE


@pytest.mark.parametrize(("name", "args", "message"), [
    ("get_order_details", ("#W9",), "order not found"),
    ("get_product_details", ("h1",), "product not found"),
    ("find_user_id_by_name_zip", ("Ann", "Lee", "0"), "user not found"),
    ("cancel_pending_order", ("#W2", "no longer needed"), "the order is delivered"),
    ("modify_pending_order_items", ("#W1", ["h1"], ["h1"], "card_1"), "the old one"),
    ("modify_pending_order_items", ("#W1", ["h1"], ["b2"], "card_1"), "of another product"),
    ("modify_pending_order_items", ("#W1", ["h1"], ["h3"], "card_1"), "not available"),
    ("modify_pending_order_items", ("#W1", ["h1"], ["h2", "b2"], "card_1"), "as many of each"),
    ("modify_pending_order_items", ("#W1", ["h1", "h1"], ["h2", "h2"], "card_1"), "not in the order"),
    ("modify_pending_order_items", ("#W1", ["h1"], ["h2"], "card_9"), "payment method not found"),
    ("modify_pending_order_payment", ("#W1", "card_1"), "the present one"),
    ("modify_pending_order_payment", ("#W1", "gift_1"), "balance is too low"),
    ("return_delivered_order_items", ("#W2", ["b1"], "card_1"), "not in the order"),
    ("exchange_delivered_order_items", ("#W1", ["h1"], ["h2"], "card_1"), "the order is pending"),
    ("calculate", ("__import__('os')",), "expected"),
    ("calculate", ("9 ** 9 ** 9",), "too large"),
])  # fmt: skip
def test_what_is_refused_changes_nothing(name, args, message):
    before, shop = copy.deepcopy(DATABASE), Shop(DATABASE)
    with pytest.raises(CallError, match=message):
        getattr(shop, name)(*args)
    assert shop.changes() == {} and before == DATABASE


def row(task_id, reason, *actions, told=()):
    return {
        "id": task_id,
        "user_scenario": {"instructions": {"reason_for_call": reason, "known_info": "You are Ann Lee, zip 0150."}},
        "evaluation_criteria": {
            "actions": [{"name": name, "arguments": arguments} for name, arguments in actions],
            "communicate_info": list(told),
        },
    }


LOOK = ("find_user_id_by_email", {"email": "ann@example.com"})
CANCEL = ("cancel_pending_order", {"order_id": "#W1", "reason": "no longer needed"})
RETURN = ("return_delivered_order_items", {"order_id": "#W2", "item_ids": ["h1"], "payment_method_id": "card_1"})
ROWS = [row("0", "Cancel #W1.", LOOK, CANCEL), row("1", "Return a hat. How much?", RETURN, told=["1,010.0"])]


@pytest.fixture(name="folder")
def _folder(tmp_path):
    (tmp_path / "db.json.gz").write_bytes(gzip.compress(json.dumps(DATABASE).encode()))
    (tmp_path / "policy.txt").write_text("# Policy\n\nBe kind.\n")
    (tmp_path / "tasks.json").write_text(json.dumps(ROWS))
    (tmp_path / "split_tasks.json").write_text(json.dumps({"train": ["0"], "test": ["1"], "base": ["0", "1"]}))
    return tmp_path


def earned(env, prompt_id, *turns):
    env.reset(options={"prompt_id": prompt_id})
    return [env.step(turn)[1] for turn in turns][-1]


def test_an_episode_by_hand(folder):
    env = Retail({"data_dir": str(folder)})
    prompt, _ = env.reset(options={"prompt_id": "0"})
    assert prompt.startswith("# Policy\n\nBe kind.\n\nTools:\n")
    assert prompt.endswith("\n\nCustomer: Cancel #W1. You are Ann Lee, zip 0150.\n")
    call = '<tool_call>{"name": "cancel_pending_order", "arguments": {"order_id": "#W1", "reason": "%s"}}</tool_call>'
    assert "Input should be 'no longer needed' or 'ordered by mistake'" in env.step(call % "just so")[0]
    assert '"status": "cancelled"' in env.step(call % "no longer needed")[0]
    assert env.step("<answer>It is cancelled.</answer>") == ("", 1.0, True, False, {})
    env.reset(options={"prompt_id": "0"})
    assert env.step("")[1:] == (0.0, True, False, {"stop_reason": "unparsable"})


def test_what_calls_change_and_what_is_told_counts(folder):
    env = Retail({"data_dir": str(folder)})
    look, cancel, done = env.gold_turns("0")
    returned = env.gold_turns("1")[0]
    assert earned(env, "0", cancel, look, done) == 1.0  # in any order
    assert earned(env, "0", look, done) == 0.0
    assert earned(env, "0", cancel, returned, done) == 0.0  # more than was asked for
    assert earned(env, "1", returned, "<answer>You get 1010.0 back</answer>") == 1.0
    assert earned(env, "1", returned, "<answer>You get money back</answer>") == 0.0


def test_a_customer_that_is_asked_says_what_is_asked_for_first(folder):
    rows = [row("0", "Cancel #W1.", LOOK, CANCEL)]
    rows[0]["user_scenario"]["instructions"] |= {"unknown_info": "You forgot your email.", "task_instructions": "."}
    (folder / "tasks.json").write_text(json.dumps(rows))
    (folder / "split_tasks.json").unlink()
    retail_data.cache_clear()
    env = Retail({"data_dir": str(folder), "user": "asked", "num_replies": 1})
    prompt, _ = env.reset(options={"prompt_id": "0"})
    assert prompt.endswith("\n\nCustomer: Cancel #W1.\n")
    assert env.step("<answer>May I have your email?</answer>")[0] == "\nCustomer: You forgot your email.\n"
    assert env.step("<answer>Then your zip code.</answer>")[0] == "\nCustomer: You are Ann Lee, zip 0150.\n"
    gold = env.gold_turns("0")
    assert env.step(gold[3])[1:] == (0.0, False, False, {"num_calls": 1, "num_call_errors": 0})
    assert env.step("<answer>Shall I?</answer>")[0] == "\nCustomer: Yes, please go ahead.\n"
    assert env.step("<answer>Done.</answer>") == ("", 1.0, True, False, {})
    assert earned(env, "0", *gold) == 1.0


def test_the_published_split_is_kept(folder):
    env = Retail({"data_dir": str(folder)})
    assert (list(env.prompt_ids("train", 0)), list(env.prompt_ids("heldout", 0))) == (["0"], ["1"])
    (folder / "split_tasks.json").unlink()
    retail_data.cache_clear()
    env = Retail({"data_dir": str(folder)})
    assert sorted([*env.prompt_ids("train", 0), *env.prompt_ids("heldout", 0)]) == ["0", "1"]


def test_what_is_missing_or_broken_is_named(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="data_dir is not set, and the package inspect-evals is not installed"):
        Retail({})
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has no tasks.json; expected tau2-bench's retail data"):
        Retail({"data_dir": str(tmp_path_factory.mktemp("empty"))})
    for broken, message in (
        ([{**ROWS[0], "evaluation_criteria": {"actions": [{"name": "rm"}]}}], "row 1: field 'arguments' is missing"),
        ([ROWS[0], row("1", "x", ("rm", {}))], r"row 2: actions \['rm'\] are unknown"),
        ([{"id": "0"}], "row 1: field 'user_scenario' is missing"),
    ):
        retail_data.cache_clear()
        (folder / "tasks.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=message):
            Retail({"data_dir": str(folder)})


@pytest.mark.skipif(importlib.util.find_spec("inspect_evals") is None, reason="inspect-evals is not installed")
@pytest.mark.parametrize("user", ["brief", "asked"])
def test_the_published_tasks_pass(user):
    env = Retail({"user": user})
    for split in ("train", "heldout"):
        for prompt_id in env.prompt_ids(split, 0):
            assert earned(env, prompt_id, *env.gold_turns(prompt_id)) == 1.0, prompt_id
