"""A shop's database and the tools of its customer service: the retail domain of tau2-bench as plain functions.

    base (read only, shared)  ->  Shop: the records that this episode changed, and tools that read and change them
    shop.cancel_pending_order("#W1", "no longer needed")
    shop.changes()            {("orders", "#W1"): {...}, ("users", "ann_1"): {...}}

Records are copied on first write, so a new shop is cheap and does not see the changes of others.
A tool that refuses raises `CallError` and leaves everything unchanged. The docstrings of the tools are shown to the
policy as tool descriptions.

Source: Barres et al., 2025, arXiv 2506.07982 (tau2-bench, retail; data MIT): the same names, arguments and effects. One
difference: if several items are changed at once, each gets the price and options of its new item.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rllib_srl.envs.tools.calculator import CalculatorError, evaluate
from rllib_srl.envs.tools.calls import CallError

Database = Mapping[str, Mapping[str, Any]]  # "products", "users", "orders" -> id -> record
Key = tuple[str, str]

_PENDING = "pending"


class Shop:
    """One episode's view of the database.

    Invariant: the base is never changed; `changes` holds every record that differs from it, and maybe more.
    """

    def __init__(self, base: Database) -> None:
        self._base = base
        self._changed: dict[Key, Any] = {}

    def changes(self) -> dict[Key, Any]:
        """Return the changed records."""
        return {key: record for key, record in self._changed.items() if record != self._base[key[0]][key[1]]}

    def tools(self) -> list[Callable[..., Any]]:
        """Return the functions that the policy may call."""
        return [getattr(self, name) for name in TOOL_NAMES]

    def _read(self, table: str, key: str) -> Any:
        if (table, key) in self._changed:
            return self._changed[table, key]
        if key not in self._base[table]:
            raise CallError(f"{_CALLED[table]} not found")
        return self._base[table][key]

    def _write(self, table: str, key: str) -> Any:
        """Return a copy of a record that may be changed."""
        if (table, key) not in self._changed:
            self._changed[table, key] = copy.deepcopy(self._read(table, key))
        return self._changed[table, key]

    # --- looking things up --------------------------------------------------------------------

    def find_user_id_by_email(self, email: str) -> str:
        """Find the id of a customer by email address.

        Args:
            email: as in something@example.com
        """
        for user_id in self._base["users"]:
            if self._read("users", user_id)["email"].lower() == email.lower():
                return user_id
        raise CallError("user not found")

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find the id of a customer by name and zip code.

        Args:
            first_name: of the customer
            last_name: of the customer
            zip: zip code of the customer's address, as in 12345
        """
        wanted = (first_name.lower(), last_name.lower(), zip)
        for user_id in self._base["users"]:
            user = self._read("users", user_id)
            name = user["name"]
            if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
                return user_id
        raise CallError("user not found")

    def get_user_details(self, user_id: str) -> dict[str, Any]:
        """Show a customer: name, address, payment methods, orders.

        Args:
            user_id: as in sara_doe_496
        """
        user: dict[str, Any] = self._read("users", user_id)
        return user

    def get_order_details(self, order_id: str) -> dict[str, Any]:
        """Show an order: items, status, payments, address.

        Args:
            order_id: with its leading #, as in #W0000000
        """
        order: dict[str, Any] = self._read("orders", order_id)
        return order

    def get_product_details(self, product_id: str) -> dict[str, Any]:
        """Show a product and its variants: item ids, options, prices, what is available.

        Args:
            product_id: not an item id
        """
        product: dict[str, Any] = self._read("products", product_id)
        return product

    def list_all_product_types(self) -> dict[str, str]:
        """List the names of all products with their product ids."""
        return {product["name"]: key for key, product in self._base["products"].items()}

    def calculate(self, expression: str) -> str:
        """Compute a number.

        Args:
            expression: numbers, + - * / and brackets
        """
        try:
            return str(round(float(evaluate(expression)), 2))
        except CalculatorError as error:
            raise CallError(str(error)) from None

    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the customer over to a person, where the policy leaves nothing else to do.

        Args:
            summary: of what the customer wants
        """
        return "Transfer successful"

    # --- changing things ----------------------------------------------------------------------

    def cancel_pending_order(self, order_id: str, reason: Literal["no longer needed", "ordered by mistake"]) -> Any:
        """Cancel a pending order and refund it.

        Args:
            order_id: with its leading #, as in #W0000000
            reason: why
        """
        self._order_that_is(order_id, (_PENDING,))
        order = self._write("orders", order_id)
        for payment in list(order["payment_history"]):
            self._book(order, "refund", payment["amount"], payment["payment_method_id"])
        order.update(status="cancelled", cancel_reason=reason)
        return order

    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Any:
        """Change where a pending order is sent.

        Args:
            order_id: with its leading #, as in #W0000000
            address1: first line
            address2: second line
            city: of the address
            state: of the address
            country: of the address
            zip: of the address
        """
        self._order_that_is(order_id, _OPEN)
        order = self._write("orders", order_id)
        order["address"] = _address(address1, address2, city, state, country, zip)
        return order

    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Any:
        """Change a customer's default address.

        Args:
            user_id: as in sara_doe_496
            address1: first line
            address2: second line
            city: of the address
            state: of the address
            country: of the address
            zip: of the address
        """
        user = self._write("users", user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return user

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Any:
        """Pay a pending order in another way.

        Args:
            order_id: with its leading #, as in #W0000000
            payment_method_id: one of the customer's, as in gift_card_0000000
        """
        order = self._order_that_is(order_id, _OPEN)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise CallError("the order has not exactly one payment")
        if history[0]["payment_method_id"] == payment_method_id:
            raise CallError("the new payment method is the present one; expected another")
        amount, before = history[0]["amount"], history[0]["payment_method_id"]
        self._check_pays(order, payment_method_id, amount)
        order = self._write("orders", order_id)
        self._book(order, "payment", amount, payment_method_id)
        self._book(order, "refund", amount, before)
        return order

    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Any:
        """Replace items of a pending order by others of the same product; this can be done once.

        Args:
            order_id: with its leading #, as in #W0000000
            item_ids: to be replaced
            new_item_ids: what comes in their place, in the same order
            payment_method_id: pays or gets the difference
        """
        order = self._order_that_is(order_id, (_PENDING,))
        if any(old == new for old, new in zip(item_ids, new_item_ids)):
            raise CallError("a new item id is the old one; expected another")
        new_variants = self._replacements(order, item_ids, new_item_ids)
        difference = self._difference(order, item_ids, new_variants)
        self._check_pays(order, payment_method_id, difference)
        order = self._write("orders", order_id)
        self._book(order, "payment" if difference > 0 else "refund", abs(difference), payment_method_id)
        for item_id, variant in zip(item_ids, new_variants):
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            item.update(item_id=variant["item_id"], price=variant["price"], options=dict(variant["options"]))
        order["status"] = "pending (item modified)"
        return order

    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> Any:
        """Take back items of a delivered order.

        Args:
            order_id: with its leading #, as in #W0000000
            item_ids: to be returned
            payment_method_id: gets the refund: the one that paid, or a gift card
        """
        order = self._order_that_is(order_id, ("delivered",))
        method = self._method(order, payment_method_id)
        if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
            raise CallError("a refund goes to the payment method that paid, or to a gift card")
        self._check_items(order, item_ids)
        order = self._write("orders", order_id)
        order.update(
            status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id
        )
        return order

    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Any:
        """Exchange items of a delivered order for others of the same product.

        Args:
            order_id: with its leading #, as in #W0000000
            item_ids: to be exchanged
            new_item_ids: what comes in their place, in the same order
            payment_method_id: pays or gets the difference
        """
        order = self._order_that_is(order_id, ("delivered",))
        difference = self._difference(order, item_ids, self._replacements(order, item_ids, new_item_ids))
        self._check_pays(order, payment_method_id, difference)
        order = self._write("orders", order_id)
        order.update(
            status="exchange requested",
            exchange_items=sorted(item_ids),
            exchange_new_items=sorted(new_item_ids),
            exchange_payment_method_id=payment_method_id,
            exchange_price_difference=difference,
        )
        return order

    # --- rules --------------------------------------------------------------------------------

    def _order_that_is(self, order_id: str, statuses: tuple[str, ...]) -> Any:
        order = self._read("orders", order_id)
        if order["status"] not in statuses:
            raise CallError(f"the order is {order['status']}; expected one that is {' or '.join(statuses)}")
        return order

    def _check_items(self, order: Mapping[str, Any], item_ids: list[str]) -> None:
        missing = Counter(item_ids) - Counter(item["item_id"] for item in order["items"])
        if missing or not item_ids:
            raise CallError(f"items {sorted(missing)} are not in the order; expected at least one that is")

    def _replacements(self, order: Mapping[str, Any], item_ids: list[str], new_item_ids: list[str]) -> list[Any]:
        """Return the variant that replaces each item, in their order."""
        self._check_items(order, item_ids)
        if len(item_ids) != len(new_item_ids):
            raise CallError(f"{len(item_ids)} items and {len(new_item_ids)} new ones; expected as many of each")
        products = {item["item_id"]: item["product_id"] for item in order["items"]}
        variants = []
        for item_id, new_item_id in zip(item_ids, new_item_ids):
            variant = self._read("products", products[item_id])["variants"].get(new_item_id)
            if variant is None or not variant["available"]:
                raise CallError(f"item {new_item_id} is not available, or of another product than {item_id}")
            variants.append(variant)
        return variants

    def _difference(self, order: Mapping[str, Any], item_ids: list[str], variants: list[Any]) -> float:
        prices = {item["item_id"]: item["price"] for item in order["items"]}
        difference: float = round(sum(new["price"] - prices[old] for old, new in zip(item_ids, variants)), 2)
        return difference

    def _method(self, order: Mapping[str, Any], payment_method_id: str) -> Any:
        methods = self._read("users", order["user_id"])["payment_methods"]
        if payment_method_id not in methods:
            raise CallError("payment method not found")
        return methods[payment_method_id]

    def _check_pays(self, order: Mapping[str, Any], payment_method_id: str, amount: float) -> None:
        method = self._method(order, payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise CallError("the gift card's balance is too low")

    def _book(self, order: Any, kind: str, amount: float, payment_method_id: str) -> None:
        """Record a payment or refund in an order that may be changed, and update the balance of a gift card."""
        order["payment_history"].append(
            {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}
        )
        if self._method(order, payment_method_id)["source"] == "gift_card":
            card = self._write("users", order["user_id"])["payment_methods"][payment_method_id]
            card["balance"] = round(card["balance"] + (amount if kind == "refund" else -amount), 2)


TOOL_NAMES = (
    "calculate",
    "cancel_pending_order",
    "exchange_delivered_order_items",
    "find_user_id_by_email",
    "find_user_id_by_name_zip",
    "get_order_details",
    "get_product_details",
    "get_user_details",
    "list_all_product_types",
    "modify_pending_order_address",
    "modify_pending_order_items",
    "modify_pending_order_payment",
    "modify_user_address",
    "return_delivered_order_items",
    "transfer_to_human_agents",
)
_OPEN = (_PENDING, "pending (item modified)")
_CALLED = {"orders": "order", "users": "user", "products": "product"}


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> dict[str, str]:
    return {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip,
    }
