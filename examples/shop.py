"""One day of a small shop, the same on every run, and an agent's tools for it, whose results are
too large."""

from __future__ import annotations

import csv
import io
import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

DAY = "2026-03-01"
ORDERS = 1_500
TIMEOUTS = frozenset({61, 204, 333, 518, 640, 777, 902, 1_015, 1_160, 1_288, 1_377, 1_442})
REFUNDED = frozenset({204, 777, 1_288})


@dataclass(frozen=True, slots=True)
class Order:
    number: int
    customer: str
    cents: int
    second: int
    card: str

    def at(self, later: float = 0) -> str:
        total = self.second + later
        return f"{DAY}T{int(total) // 3600:02}:{int(total) // 60 % 60:02}:{total % 60:06.3f}Z"


@cache
def _orders() -> tuple[Order, ...]:
    dice = random.Random(7)
    names = (
        "Ada",
        "Ben",
        "Caro",
        "Dario",
        "Edda",
        "Finn",
        "Greta",
        "Hugo",
        "Ines",
        "Jan",
        "Kaya",
        "Lars",
    )
    return tuple(
        Order(
            48_000 + number,
            f"{dice.choice(names)}-{dice.randrange(100, 1_000)}",
            dice.randrange(500, 25_000),
            28_800 + number * 24 + dice.randrange(20),
            f"{dice.choice(('visa', 'amex', 'mc'))} {dice.randrange(1_000, 10_000)}",
        )
        for number in range(ORDERS)
    )


def fetch_log(service: str, day: str) -> str:
    """Return the complete log of a service for one day."""
    dice = random.Random(11)
    lines = []
    for number, order in enumerate(_orders()):
        trace = f"{dice.getrandbits(32):08x}"
        lines.append(
            f"{order.at()} INFO {service} [{trace}] order {order.number}: cart accepted, {order.cents} cents"
        )
        if number in TIMEOUTS:
            lines.append(
                f"{order.at(9)} WARN {service} [{trace}] order {order.number}: capture timed out, sent again"
            )
        lines.append(
            f"{order.at(9.5)} INFO {service} [{trace}] order {order.number}: captured in {dice.randrange(80, 900)} ms"
        )
    return "\n".join(lines) + "\n"


def export_orders(day: str) -> str:
    """Return all orders of one day, as CSV."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(
        ["order", "customer", "placed_at", "cents", "currency", "status", "items", "country"]
    )
    dice = random.Random(13)
    for order in _orders():
        place = dice.choice(("DE", "AT", "CH", "FR"))
        rows.writerow(
            [
                order.number,
                order.customer,
                order.at(),
                order.cents,
                "EUR",
                "paid",
                dice.randrange(1, 6),
                place,
            ]
        )
    return text.getvalue()


def fetch_charges(day: str) -> dict[str, Any]:
    """Return all charges of the payment provider for one day, with their refunds."""
    dice = random.Random(17)
    charges = []
    for number, order in enumerate(_orders()):
        for attempt in range(2 if number in TIMEOUTS else 1):
            brand, digits = order.card.split()
            charges.append(
                {
                    "id": f"ch_{dice.getrandbits(64):016x}",
                    "order": order.number,
                    "amount": {"cents": order.cents, "currency": "EUR"},
                    "status": "captured",
                    "attempt": attempt + 1,
                    "created": order.at(1 + 8 * attempt),
                    "card": {"brand": brand, "last4": digits},
                    "refund": f"re_{dice.getrandbits(32):08x}"
                    if attempt and number in REFUNDED
                    else None,
                }
            )
    return {"object": "list", "day": day, "has_more": False, "charges": charges}


def reconcile(log: str, orders: str, charges: dict[str, Any]) -> dict[str, Any]:
    """Compare a log, the orders (CSV) and the charges of a day: who was charged more than once
    without a refund."""
    customers = {int(row["order"]): row["customer"] for row in csv.DictReader(io.StringIO(orders))}
    captured = defaultdict(list)
    for charge in charges["charges"]:
        captured[charge["order"]].append(charge)
    double = {order: found for order, found in captured.items() if len(found) > 1}
    owed = {
        order: found
        for order, found in double.items()
        if not any(charge["refund"] for charge in found)
    }
    again = [line for line in log.splitlines() if "sent again" in line]
    return {
        "charged_twice": len(double),
        "refunded": len(double) - len(owed),
        "owed_cents": sum(found[0]["amount"]["cents"] for found in owed.values()),
        "customers": [customers[order] for order in owed],
        "explained_by_timeouts": all(
            any(f"order {order}:" in line for line in again) for order in double
        ),
    }


TOOLS = (fetch_log, export_orders, fetch_charges, reconcile)
