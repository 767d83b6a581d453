"""`python -m benchmarks.peers.child NAME FOLDER`: one side of the comparison, in a process of its
own.

Reads requests as lines of JSON and answers each with one: `{"kind", "size", "number", "call"}` is
offloaded and timed. With `"look"`, untimed, the answer has what the model gets and whether the
content comes back exactly. Needs nothing of Coatcheck's: it runs where only the peers are
installed.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers import PEERS, adapters
from benchmarks.peers.contents import content


def main(name: str, folder: Path, requests: TextIO, answers: TextIO) -> None:
    try:
        adapter: adapters.Adapter = getattr(adapters, name)(folder)
    except Exception as error:  # noqa: BLE001 - whatever keeps a package from working is why it is not measured
        print(
            json.dumps({"missing": f"{type(error).__name__}: {error}"[:200]}),
            file=answers,
            flush=True,
        )
        return
    found = version(PEERS[name].package) if name in PEERS else ""
    print(json.dumps({"version": found}), file=answers, flush=True)
    loop = asyncio.new_event_loop()
    gc.collect()
    gc.disable()
    for line in requests:
        request = json.loads(line)
        text = content(request["kind"], request["size"], request["number"])
        seconds, given = loop.run_until_complete(_timed(adapter, text, request["call"]))
        answer: dict[str, Any] = {"seconds": seconds}
        if request.get("look"):
            back = loop.run_until_complete(_settled(adapter.read(given)))
            answer |= {"model_text": adapter.model_text(given), "exact": back == text}
        print(json.dumps(answer), file=answers, flush=True)
    loop.close()


async def _timed(adapter: adapters.Adapter, text: str, call_id: str) -> tuple[float, Any]:
    result = adapter.prepare(text, call_id)
    start = time.perf_counter()
    given = adapter.run(result)
    if inspect.isawaitable(given):
        given = await given
    return time.perf_counter() - start, given


async def _settled(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


if __name__ == "__main__":
    # What a peer prints must not come between the answers.
    to_parent = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(sys.argv[1], Path(sys.argv[2]), sys.stdin, to_parent)
