"""12 tasks that need several calls of tools: joins, fan-out, paging, partial failure, a time limit,
an approval, and large values that go from one tool to another.

Each has the calls that a careful model would make one by one, each with a small program that says
what it needs of the result, and one program that does all of it. The tools' data is made here, the
same in every run. Answers are computed from that data.
"""

from __future__ import annotations

import csv
import io
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

TIME_LIMIT: Final = 1.0  # seconds for each call
_WORDS: Final = [
    "alpha",
    "bravo",
    "cargo",
    "delta",
    "ember",
    "fjord",
    "grove",
    "hotel",
    "index",
    "joker",
    "kilo",
    "lemon",
    "metro",
]


class Ask(Protocol):
    """Calls a tool. `code` is what is needed of the result, as a program that prints JSON; without
    it, the result itself. Raises `ToolFailed`."""

    def __call__(self, tool: str, code: str = "", **arguments: Any) -> Any: ...

    def kept(self, tool: str, **arguments: Any) -> Any:
        """Call a tool whose result is only passed on or compared."""

    def compared(self, one: Any, other: Any, code: str) -> Any:
        """Compare two kept results with a program: `data` is one, `artifact("OTHER")` the other."""


class ToolFailed(Exception):
    """A tool failed, or took too long."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one task, new for each way that it is solved, and the answer."""

    tools: Mapping[str, Callable[..., Any]]
    answer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`one_by_one` solves it with separate calls, `program` in one. `again` is what a model sends
    after an error, with the first pointer of that answer for `POINTER`: here, where rows were taken
    for text. A person approves each call of the tools in
    `approved`."""

    name: str
    toolbox: Callable[[], Toolbox]
    one_by_one: Callable[[Ask], Any]
    program: str
    again: str = ""
    approved: tuple[str, ...] = ()


def _random(seed: int) -> random.Random:
    return random.Random(seed)


# People, levels and expenses


def _expenses() -> Toolbox:
    rng = _random(1)
    people = [
        {"id": f"p{n}", "name": f"{rng.choice(_WORDS).title()} {n}", "level": rng.choice("abc")}
        for n in range(20)
    ]
    limits = {"a": 9_000, "b": 11_000, "c": 13_000}
    spent: dict[str, list[dict[str, Any]]] = {
        one["id"]: [
            {"day": f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}", "amount": rng.randint(5, 390),
             "category": rng.choice(_WORDS), "note": " ".join(rng.choices(_WORDS, k=8))}
            for _ in range(60)
        ]
        for one in people
    }  # fmt: skip

    def list_people(team: str) -> list[dict[str, str]]:
        """The people of a team."""
        return people

    def get_expenses(person: str) -> list[dict[str, Any]]:
        """The expenses of a person in this year."""
        return spent[person]

    def get_budget(level: str) -> int:
        """The budget of a level for a year."""
        return limits[level]

    over = [one["name"] for one in people
            if sum(row["amount"] for row in spent[one["id"]]) > limits[one["level"]]]  # fmt: skip
    return Toolbox(
        {"list_people": list_people, "get_expenses": get_expenses, "get_budget": get_budget}, over
    )


def _over_budget(ask: Ask) -> list[str]:
    people = ask("list_people", team="north")
    budgets = {
        level: ask("get_budget", level=level) for level in sorted({one["level"] for one in people})
    }
    total = 'print(sum(row["amount"] for row in data))'
    return [
        one["name"]
        for one in people
        if ask("get_expenses", total, person=one["id"]) > budgets[one["level"]]
    ]


# Services


def _services() -> Toolbox:
    rng = _random(2)
    names = [f"{word}-{n}" for n in (1, 2, 3) for word in _WORDS[:10]]
    down = set(rng.sample(names, 3))

    def list_services() -> list[str]:
        """The names of all services."""
        return names

    def get_health(service: str) -> dict[str, Any]:
        """The health of a service, with its checks."""
        checks: list[dict[str, Any]] = [
            {"name": f"check-{n}", "ok": True, "took_ms": n * 3, "detail": " ".join(_WORDS)}
            for n in range(40)
        ]
        checks[17]["ok"] = service not in down
        return {"service": service, "checks": checks}

    return Toolbox({"list_services": list_services, "get_health": get_health}, sorted(down))


def _unhealthy(ask: Ask) -> list[str]:
    code = 'import json\nprint(json.dumps(all(c["ok"] for c in data["checks"])))'
    return sorted(one for one in ask("list_services") if not ask("get_health", code, service=one))


# Pages


def _events() -> Toolbox:
    rng = _random(3)
    events = [
        {"id": n, "level": rng.choice(("info", "info", "warning", "error")), "source": rng.choice(_WORDS),
         "text": " ".join(rng.choices(_WORDS, k=12))}
        for n in range(1_000)
    ]  # fmt: skip

    def list_events(cursor: int = 0) -> dict[str, Any]:
        """A page of events, and the cursor of the next one, or null."""
        following = cursor + 100
        return {
            "events": events[cursor:following],
            "next": following if following < len(events) else None,
        }

    errors = Counter(one["source"] for one in events if one["level"] == "error")
    return Toolbox(
        {"list_events": list_events}, max(errors.items(), key=lambda one: (one[1], one[0]))
    )


def _most_errors(ask: Ask) -> tuple[str, int]:
    code = ('import json\nprint(json.dumps([data["next"], '
            '[e["source"] for e in data["events"] if e["level"] == "error"]]))')  # fmt: skip
    counts: Counter[str] = Counter()
    cursor: int | None = 0
    while cursor is not None:
        cursor, sources = ask("list_events", code, cursor=cursor)
        counts.update(sources)
    return max(counts.items(), key=lambda one: (one[1], one[0]))


def _audit() -> Toolbox:
    rng = _random(4)
    entries = [
        {"who": f"user-{rng.randint(1, 90)}", "action": rng.choice(("read", "write", "login")), "target": f"doc-{n}",
         "from": " ".join(rng.choices(_WORDS, k=9))}
        for n in range(900)
    ]  # fmt: skip
    entries[640] = {"who": "user-41", "action": "delete", "target": "doc-640", "from": "console"}

    def read_audit(page: int) -> list[dict[str, str]]:
        """A page of the audit log, the newest entries first; empty after the last."""
        return entries[page * 100 : page * 100 + 100]

    return Toolbox({"read_audit": read_audit}, "user-41")


def _who_deleted(ask: Ask) -> str:
    code = 'import json\nprint(json.dumps([r["who"] for r in data if r["action"] == "delete"]))'
    for page in range(10):
        found = ask("read_audit", code, page=page)
        if found:
            return str(found[0])
    return ""


# Failures


def _sales() -> Toolbox:
    rng = _random(5)
    regions = [f"region-{n}" for n in range(12)]
    rows: dict[str, list[dict[str, Any]]] = {one: [{"day": n, "total": rng.randint(10, 900), "shop": " ".join(rng.choices(_WORDS, k=6))} for n in range(90)]
            for one in regions}  # fmt: skip
    broken = ["region-3", "region-8"]

    def list_regions() -> list[str]:
        """The names of all regions."""
        return regions

    def get_sales(region: str) -> list[dict[str, Any]]:
        """The sales of a region, one row a day."""
        if region in broken:
            raise ConnectionError(f"the database of {region} does not answer")
        return rows[region]

    total = sum(row["total"] for one in regions if one not in broken for row in rows[one])
    return Toolbox({"list_regions": list_regions, "get_sales": get_sales}, [total, broken])


def _all_sales(ask: Ask) -> list[Any]:
    total, failed = 0, []
    for region in ask("list_regions"):
        try:
            total += ask("get_sales", 'print(sum(r["total"] for r in data))', region=region)
        except ToolFailed:
            failed.append(region)
    return [total, failed]


def _prices() -> Toolbox:
    rng = _random(6)
    prices = {f"sku-{n}": rng.randint(100, 9_000) for n in range(15)}
    asked: Counter[str] = Counter()

    def list_skus() -> list[str]:
        """The articles in the basket."""
        return list(prices)

    def get_offers(sku: str) -> dict[str, Any]:
        """The offers for an article. Fails now and then; then try once more."""
        asked[sku] += 1
        if asked[sku] == 1 and sku in ("sku-2", "sku-9", "sku-12"):
            raise ConnectionError("503, try again")
        offers = [
            {"shop": f"shop-{n}", "price": prices[sku] + 10 * n, "terms": " ".join(_WORDS)}
            for n in range(40)
        ]
        return {"sku": sku, "offers": offers[::-1]}

    return Toolbox({"list_skus": list_skus, "get_offers": get_offers}, sum(prices.values()))


def _cheapest(ask: Ask) -> int:
    total = 0
    code = 'print(min(o["price"] for o in data["offers"]))'
    for sku in ask("list_skus"):
        try:
            total += ask("get_offers", code, sku=sku)
        except ToolFailed:
            total += ask("get_offers", code, sku=sku)
    return total


def _mirrors() -> Toolbox:
    rng = _random(7)
    mirrors = [f"mirror-{n}" for n in range(10)]
    age = {one: rng.randint(1, 200) for one in mirrors}

    def list_mirrors() -> list[str]:
        """The names of all mirrors."""
        return mirrors

    def get_index(mirror: str) -> list[dict[str, Any]]:
        """The index of a mirror: its files with their age in hours."""
        if mirror == "mirror-4":
            time.sleep(2 * TIME_LIMIT)
        return [
            {"file": f"{word}-{n}.tar", "age": age[mirror] + n}
            for n in range(40)
            for word in _WORDS[:3]
        ]

    stale = [one for one in mirrors if one != "mirror-4" and age[one] > 100]
    return Toolbox({"list_mirrors": list_mirrors, "get_index": get_index}, [stale, ["mirror-4"]])


def _stale_mirrors(ask: Ask) -> list[list[str]]:
    stale, slow = [], []
    for mirror in ask("list_mirrors"):
        try:
            if ask("get_index", 'print(min(f["age"] for f in data))', mirror=mirror) > 100:
                stale.append(mirror)
        except ToolFailed:
            slow.append(mirror)
    return [stale, slow]


# An approval


def _branches() -> Toolbox:
    rng = _random(8)
    branches: list[dict[str, Any]] = [
        {"name": f"{rng.choice(_WORDS)}/{n}", "merged": True, "age_days": rng.randint(1, 80), "author": rng.choice(_WORDS),
         "subject": " ".join(rng.choices(_WORDS, k=9))}
        for n in range(300)
    ]  # fmt: skip
    for number in (31, 207):
        branches[number]["age_days"] = 400 + number
    old = [one["name"] for one in branches if one["age_days"] > 365]

    def list_branches() -> list[dict[str, Any]]:
        """All branches of the repository."""
        return branches

    def delete_branch(name: str) -> str:
        """Delete a branch."""
        return f"{name} was deleted"

    return Toolbox({"list_branches": list_branches, "delete_branch": delete_branch}, old)


def _delete_old(ask: Ask) -> list[str]:
    code = (
        'import json\nprint(json.dumps([b["name"] for b in data '
        'if b["merged"] and b["age_days"] > 365]))'
    )
    old = list(ask("list_branches", code))
    for name in old:
        ask("delete_branch", name=name)
    return old


# Large values


def _exported() -> Toolbox:
    rng = _random(9)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["order", "vat_id", "country", "note"])
    wrong = 0
    for n in range(2_000):
        is_wrong = rng.random() < 0.03
        wrong += is_wrong
        vat = f"DE{rng.randrange(10**9):09}" if not is_wrong else f"XX{n}"
        writer.writerow([n, vat, "DE", " ".join(rng.choices(_WORDS, k=5))])
    table = out.getvalue()

    def export_orders(year: int) -> str:
        """The orders of a year as CSV."""
        return table

    def check_vat_ids(table: str) -> dict[str, int]:
        """Check the VAT ids of orders, given as CSV."""
        rows = list(csv.DictReader(io.StringIO(table)))
        bad = sum(not row["vat_id"].startswith("DE") for row in rows)
        return {"checked": len(rows), "invalid": bad}

    return Toolbox(
        {"export_orders": export_orders, "check_vat_ids": check_vat_ids},
        {"checked": 2_000, "invalid": wrong},
    )


def _check_export(ask: Ask) -> Any:
    return ask("check_vat_ids", table=ask.kept("export_orders", year=2026))


def _configs() -> Toolbox:
    rng = _random(10)
    staging = {
        f"{a}.{b}.{n}": rng.randint(1, 999) for a in _WORDS for b in _WORDS[:6] for n in range(4)
    }
    production = dict(staging)
    for key in ("cargo.delta.2", "lemon.alpha.0", "metro.fjord.3"):
        production[key] += 1

    def get_config(environment: str) -> dict[str, int]:
        """The settings of an environment."""
        return staging if environment == "staging" else production

    return Toolbox({"get_config": get_config}, ["cargo.delta.2", "lemon.alpha.0", "metro.fjord.3"])


def _differences(ask: Ask) -> list[str]:
    one, other = (ask.kept("get_config", environment=name) for name in ("staging", "production"))
    code = """import json
other = artifact("OTHER")
print(json.dumps(sorted(k for k in data if data[k] != other[k])))"""
    return list(ask.compared(one, other, code))


def _issues() -> Toolbox:
    rng = _random(11)
    issues: dict[int, dict[str, Any]] = {
        n: {"id": n, "author": rng.choice(_WORDS), "events": [
            {"type": rng.choice(("labeled", "closed", "reopened", "commented")), "text": " ".join(rng.choices(_WORDS, k=10))}
            for _ in range(45)
        ]}
        for n in range(25)
    }  # fmt: skip

    def search_issues(query: str) -> list[int]:
        """The ids of the issues that match."""
        return list(issues)

    def get_issue(id: int) -> dict[str, Any]:  # noqa: A002 - what the model passes
        """An issue with its events."""
        return issues[id]

    counts: Counter[str] = Counter()
    for one in issues.values():
        counts[one["author"]] += sum(event["type"] == "reopened" for event in one["events"])
    return Toolbox(
        {"search_issues": search_issues, "get_issue": get_issue},
        max(counts.items(), key=lambda c: (c[1], c[0])),
    )


def _most_reopened(ask: Ask) -> tuple[str, int]:
    code = 'import json\nprint(json.dumps([data["author"], sum(e["type"] == "reopened" for e in data["events"])]))'
    counts: Counter[str] = Counter()
    for number in ask("search_issues", query="is:open"):
        author, reopened = ask("get_issue", code, id=number)
        counts[author] += reopened
    return max(counts.items(), key=lambda c: (c[1], c[0]))


def _orders() -> Toolbox:
    rng = _random(12)
    customers: list[dict[str, Any]] = [{"id": n, "country": rng.choice(("DE", "FR", "IT", "PL")), "name": " ".join(rng.choices(_WORDS, k=4))}
                 for n in range(400)]  # fmt: skip
    rates = {"EUR": 1, "PLN": 4, "CHF": 2}
    lines = ["customer,amount,currency"]
    totals: Counter[str] = Counter()
    for _ in range(1_500):
        customer, amount = rng.choice(customers), rng.randint(1, 500) * 4
        currency = rng.choice(sorted(rates))
        lines.append(f"{customer['id']},{amount},{currency}")
        totals[customer["country"]] += amount // rates[currency]
    table = "\n".join(lines) + "\n"

    def get_customers() -> list[dict[str, Any]]:
        """All customers."""
        return customers

    def get_orders(month: str) -> str:
        """The orders of a month as CSV."""
        return table

    def get_rates() -> dict[str, int]:
        """How much of each currency is one euro."""
        return rates

    tools: dict[str, Callable[..., Any]] = {
        "get_customers": get_customers,
        "get_orders": get_orders,
        "get_rates": get_rates,
    }
    return Toolbox(tools, dict(sorted(totals.items())))


def _by_country(ask: Ask) -> Any:
    rates = ask("get_rates")
    orders, customers = ask.kept("get_orders", month="2026-10"), ask.kept("get_customers")
    code = f"""import json
country = {{str(c["id"]): c["country"] for c in artifact("OTHER")}}
rates, n = {rates}, Counter()
for r in data:
    n[country[str(r["customer"])]] += int(r["amount"]) // rates[r["currency"]]
print(json.dumps(dict(sorted(n.items()))))"""
    return ask.compared(orders, customers, code)


TASKS: Final = (
    Task(
        name="join: people, their expenses and budgets", toolbox=_expenses, one_by_one=_over_budget,
        program=(
            "import json\n"
            'people = list_people(team="north")\n'
            'budget = {l: get_budget(level=l) for l in sorted({p["level"] for p in people})}\n'
            'print(json.dumps([p["name"] for p in people if sum(r["amount"] for r in get_expenses(person=p["id"])) '
            '> budget[p["level"]]]))'
        ),
    ),
    Task(
        name="fan-out: the health of 30 services", toolbox=_services, one_by_one=_unhealthy,
        program=(
            "import json\n"
            "print(json.dumps(sorted(s for s in list_services() "
            'if not all(c["ok"] for c in get_health(service=s)["checks"]))))'
        ),
    ),
    Task(
        name="paging: count over ten pages", toolbox=_events, one_by_one=_most_errors,
        program=(
            "import json\nn = Counter()\ncursor = 0\n"
            "while cursor is not None:\n"
            "    page = list_events(cursor=cursor)\n"
            '    n.update(e["source"] for e in page["events"] if e["level"] == "error")\n'
            '    cursor = page["next"]\n'
            "print(json.dumps(max(n.items(), key=lambda c: (c[1], c[0]))))"
        ),
    ),
    Task(
        name="paging: until something is found", toolbox=_audit, one_by_one=_who_deleted,
        program=(
            "import json\n"
            "for page in range(10):\n"
            '    found = [r["who"] for r in read_audit(page=page) if r["action"] == "delete"]\n'
            "    if found:\n        print(json.dumps(found[0]))\n        break"
        ),
    ),
    Task(
        name="partial failure: two of twelve regions", toolbox=_sales, one_by_one=_all_sales,
        program=(
            "import json\ntotal, failed = 0, []\n"
            "for region in list_regions():\n"
            "    try:\n"
            '        total += sum(r["total"] for r in get_sales(region=region))\n'
            "    except Exception:\n"
            "        failed.append(region)\n"
            "print(json.dumps([total, failed]))"
        ),
    ),
    Task(
        name="failures that pass: a second try", toolbox=_prices, one_by_one=_cheapest,
        program=(
            "import json\ntotal = 0\n"
            "for sku in list_skus():\n"
            "    try:\n        found = get_offers(sku=sku)\n"
            "    except Exception:\n        found = get_offers(sku=sku)\n"
            '    total += min(o["price"] for o in found["offers"])\n'
            "print(json.dumps(total))"
        ),
    ),
    Task(
        name="time limit: one of ten mirrors", toolbox=_mirrors, one_by_one=_stale_mirrors,
        program=(
            "import json\nstale, slow = [], []\n"
            "for mirror in list_mirrors():\n"
            "    try:\n"
            '        if min(f["age"] for f in get_index(mirror=mirror)) > 100:\n            stale.append(mirror)\n'
            "    except TimeoutError:\n        slow.append(mirror)\n"
            "print(json.dumps([stale, slow]))"
        ),
    ),
    Task(
        name="approval: delete what is old", toolbox=_branches, one_by_one=_delete_old,
        program=(
            "import json\n"
            'old = [b["name"] for b in list_branches() if b["merged"] and b["age_days"] > 365]\n'
            "for name in old:\n    delete_branch(name=name)\n"
            "print(json.dumps(old))"
        ),
        approved=("delete_branch",),
    ),
    Task(
        name="a large value from tool to tool", toolbox=_exported, one_by_one=_check_export,
        program="import json\nprint(json.dumps(check_vat_ids(table=export_orders(year=2026))))",
        again='import json\nprint(json.dumps(check_vat_ids(table="POINTER")))',
    ),
    Task(
        name="compare: two configurations", toolbox=_configs, one_by_one=_differences,
        program=(
            'import json\none, other = get_config(environment="staging"), get_config(environment="production")\n'
            "print(json.dumps(sorted(k for k in one if one[k] != other[k])))"
        ),
    ),
    Task(
        name="chain: search, then each issue", toolbox=_issues, one_by_one=_most_reopened,
        program=(
            "import json\nn = Counter()\n"
            'for number in search_issues(query="is:open"):\n'
            "    issue = get_issue(id=number)\n"
            '    n[issue["author"]] += sum(e["type"] == "reopened" for e in issue["events"])\n'
            "print(json.dumps(max(n.items(), key=lambda c: (c[1], c[0]))))"
        ),
    ),
    Task(
        name="join: orders, customers and rates", toolbox=_orders, one_by_one=_by_country,
        program=(
            "import json\nrates = get_rates()\n"
            'country = {c["id"]: c["country"] for c in get_customers()}\nn = Counter()\n'
            'for line in get_orders(month="2026-10").splitlines()[1:]:\n'
            '    customer, amount, currency = line.split(",")\n'
            "    n[country[int(customer)]] += int(amount) // rates[currency]\n"
            "print(json.dumps(dict(sorted(n.items()))))"
        ),
        again=(
            "import json\nrates = get_rates()\n"
            'country = {c["id"]: c["country"] for c in get_customers()}\nn = Counter()\n'
            'for row in get_orders(month="2026-10"):\n'
            '    n[country[int(row["customer"])]] += int(row["amount"]) // rates[row["currency"]]\n'
            "print(json.dumps(dict(sorted(n.items()))))"
        ),
    ),
)  # fmt: skip
