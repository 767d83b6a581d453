"""Make the store that is kept for a released format: `python -m tests.stores.make`, once, before
its release.

A store that is kept never changes: `tests/storage/test_kept_stores.py` proves that every later
version still reads it.
"""

import io
import tarfile
import tempfile
from pathlib import Path

import coatcheck
from coatcheck.storage.sqlite_schema import STEPS

SMALL = "small text, with é and 你好\n"
ROWS = {"rows": [{"id": 1}, {"id": 2, "name": None}]}
LOG = "".join(f"2026-01-01 00:00:{i % 60:02} INFO line {i}\n" for i in range(20_000))
COLD = "".join(f"cold line {i}\n" for i in range(30_000))

STATES = (b'{"objective":"first"}', b"any bytes \x00\xff", bytes(100_000))


def fill(store: coatcheck.Store) -> None:
    session = store.session("kept", ttl=None)
    session.put(COLD, name="cold")
    store.collect(cold_after=-1)
    session.put("first", name="versions", tool="t", call_id="c1", producer="planner")
    session.put("second", name="versions")
    rows = session.put(ROWS, name="rows", kind="data")
    session.put(LOG, name="log", parents=[rows])
    session.put(SMALL.encode(), name="bytes")
    session.pin("rows")
    store.session("child", parent="kept", ttl=None).put(SMALL)
    session.grant(rows, to="granted")
    store.session("granted", ttl=None)
    token = session.claim("dispatcher")
    for state in STATES:
        session.record("hot", state, token=token)
    session.record("other", b"not under the claim")


def main() -> None:
    target = Path(__file__).with_name(f"format-{len(STEPS)}.tar.gz")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(target, "x:gz") as tar:
        with coatcheck.open(Path(folder) / "store") as store:
            fill(store)
        for path in sorted((Path(folder) / "store").rglob("*")):
            if path.is_file() and path.name not in ("reserve", "lock"):
                info = tarfile.TarInfo(str(path.relative_to(folder)))
                info.size = path.stat().st_size
                info.mode = 0o600
                tar.addfile(info, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    main()
