"""The store of a fleet: blobs in an object store, catalog and full-text index in PostgreSQL.

The url is `s3://bucket/prefix?catalog=postgresql://…`. Other query parameters go to the object
store. Missing settings come from the standard environment variables of AWS and PostgreSQL.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import parse_qsl, urlsplit

from coatcheck.checks import whole_text
from coatcheck.errors import InvalidArgument, needs_extra
from coatcheck.ids import digest_of

if TYPE_CHECKING:
    from obstore.store import S3Config

    from coatcheck.storage.postgres_catalog import PostgresCatalog
    from coatcheck.storage.postgres_passages import PostgresPassages
    from coatcheck.storage.s3 import S3Blobs

_OPTIONS: Final = {
    "endpoint": "endpoint",
    "region": "region",
    "access_key_id": "access_key_id",
    "secret_access_key": "secret_access_key",
    "session_token": "session_token",
    "virtual_hosted": "virtual_hosted_style_request",
}
SWEEP_AFTER: Final = 900  # seconds before a copy without a row is swept, in addition to its lease
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PREFIX: Final = re.compile(r"(?:[A-Za-z0-9._=-]+/)*")


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a fleet's store. Its repr contains no secret."""

    bucket: str
    prefix: str
    catalog: str
    schema: str
    options: dict[str, str]
    connections: int
    sweep_after: float

    def __repr__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse(url: str) -> Place:
    """Parse a fleet's url. Raises `InvalidArgument`; the message never repeats a part that may
    contain a password."""
    parts = urlsplit(url)
    prefix = parts.path.lstrip("/")
    prefix = prefix + "/" if prefix and not prefix.endswith("/") else prefix
    if not parts.netloc or "@" in parts.netloc:
        raise InvalidArgument(
            "the url has no valid bucket name", hint="s3://bucket/prefix?catalog=postgresql://…"
        )
    if not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
        raise InvalidArgument(
            "the prefix in the url is invalid", hint="use letters, digits and ._=- between slashes"
        )
    # The catalog's url has a query of its own, so it comes last and takes the rest.
    before, _, catalog = parts.query.partition("catalog=")
    catalog = catalog if "://" in catalog else dict(parse_qsl("c=" + catalog)).get("c", "")
    if not catalog.startswith(("postgresql://", "postgres://")):
        raise InvalidArgument("the url has no catalog", hint="end it with ?catalog=postgresql://…")
    given = dict(parse_qsl(before.rstrip("&")))
    schema = given.pop("schema", "coatcheck")
    connections = whole_text(given.pop("connections", "16"), "connections", least=1, most=1000)
    sweep_after = whole_text(given.pop("sweep_after", str(SWEEP_AFTER)), "sweep_after")
    unknown = [name for name in given if name not in _OPTIONS]
    if unknown:
        raise InvalidArgument(
            f"unknown parameters in the url: {', '.join(sorted(unknown))}",
            hint="use schema, connections, sweep_after, " + ", ".join(_OPTIONS),
        )
    if not _SCHEMA.fullmatch(schema):
        raise InvalidArgument(
            "the schema name is invalid", hint="use lower-case letters, digits and _"
        )
    options = {_OPTIONS[name]: value for name, value in given.items()}
    return Place(parts.netloc, prefix, catalog, schema, options, connections, sweep_after)


def open_fleet(
    place: Place, *, tenant: str = "", create: bool = True, patience: float = 30.0
) -> tuple[S3Blobs, PostgresCatalog, PostgresPassages]:
    """Open the backend of a tenant. The store itself is the tenant with an empty name."""
    with needs_extra("s3"):
        from obstore.store import S3Store
    with needs_extra("postgres"):
        from coatcheck.storage.postgres import Connections, DatabaseLeases
        from coatcheck.storage.postgres_catalog import PostgresCatalog
        from coatcheck.storage.postgres_passages import PostgresPassages
        from coatcheck.storage.postgres_schema import migrate
    from coatcheck.storage.s3 import S3Blobs

    own = f"tenants/{digest_of(tenant.encode())}/" if tenant else ""
    options = cast("S3Config", {"conditional_put": "etag", **place.options})
    named = (place.options.get("endpoint"), os.environ.get("AWS_ENDPOINT_URL_S3"),
             os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_ENDPOINT"))  # fmt: skip
    endpoint = next((one for one in named if one), "")
    bucket = S3Store(
        place.bucket,
        config=options,
        client_options={"allow_http": endpoint.startswith("http://"),
                        "timeout": timedelta(seconds=max(5.0, patience * 2)),
                        "connect_timeout": timedelta(seconds=min(10.0, patience))},
        retry_config={"max_retries": 10, "retry_timeout": timedelta(seconds=patience),
                      "backoff": {"init_backoff": timedelta(milliseconds=50),
                                  "max_backoff": timedelta(seconds=2), "base": 2}},
    )  # fmt: skip
    connections = Connections(
        place.catalog, schema=place.schema, tenant=tenant, size=place.connections, patience=patience
    )
    try:
        migrate(connections, create=create)
    except BaseException:
        connections.close()
        raise
    blobs = S3Blobs(
        bucket,
        uri=f"s3://{place.bucket}/{place.prefix}{own}",
        leases=DatabaseLeases(connections),
        prefix=place.prefix + own,
        sweep_after=place.sweep_after,
        patience=patience,
    )
    return blobs, PostgresCatalog(connections), PostgresPassages(connections)
