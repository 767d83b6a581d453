"""JSON documents that many tools print, described by their own nouns.

Each known document is one row of `_KNOWN`. To add one, write a function from the document to a
`Known`, or None if it is something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .columns import safe
from .drafts import Section
from .excerpts import masked_line, some

_METHODS: Final = ("get", "put", "post", "delete", "patch", "head", "options", "trace")
_NAMES: Final = 40
_WORDS: Final = 60


@dataclass(frozen=True, slots=True)
class Known:
    """What a known document is. If it `is_complete`, nothing else needs to be described. `ask` is
    the first read and the path to the part that it is for."""

    title: str
    sections: Sequence[Section] = ()
    is_complete: bool = False
    ask: tuple[str, str] | None = None


def known(document: object) -> Known | None:
    """Describe a known document; None for any other."""
    for recognise in _KNOWN:
        found = recognise(document)
        if found is not None:
            return found
    return None


def _openapi(document: object) -> Known | None:
    """OpenAPI and Swagger: operations per method, tags, schemas."""
    if not isinstance(document, dict) or not isinstance(document.get("paths"), dict):
        return None
    version = document.get("openapi") or document.get("swagger")
    if not isinstance(version, str):
        return None
    paths: dict[str, Any] = document["paths"]
    methods: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    listed: list[str] = []
    for path, item in paths.items():
        if not isinstance(item, dict):
            continue
        used = [method for method in _METHODS if isinstance(item.get(method), dict)]
        methods.update(used)
        listed.append(f"{masked_line(path, 70)} {','.join(used)}")
        for method in used:
            tags.update(_strings(item[method].get("tags")))
    info = document.get("info") if isinstance(document.get("info"), dict) else {}
    schemas = _schemas(document)
    title = f"OpenAPI {masked_line(version, 12)}"
    name = info.get("title") if isinstance(info, dict) else None
    title += f" “{masked_line(str(name), 60)}”" if name else ""
    title += f": {some(len(paths), 'path')}, {some(methods.total(), 'operation')}"
    counts = ", ".join(f"{method} {times}" for method, times in methods.most_common())
    title += f" ({counts})" if counts else ""
    title += f", {some(len(schemas), 'schema')}"
    sections = [
        Section("tags: ", _counted(tags), "tags", share=0.3),
        Section("paths: ", listed[:200], "paths", len(paths), share=0.4),
        Section("schemas: ", [masked_line(name, 50) for name in schemas[:200]], "schemas",
                len(schemas), share=0.25),
    ]  # fmt: skip
    kept = [one for one in sections if one.items]
    return Known(title, kept, is_complete=True, ask=('query="$.paths[*][*].operationId"', ""))


def _schemas(document: Mapping[str, Any]) -> list[str]:
    components = document.get("components")
    found = components.get("schemas") if isinstance(components, dict) else None
    found = found if isinstance(found, dict) else document.get("definitions")
    return list(map(str, found)) if isinstance(found, dict) else []


def _npm(document: object) -> Known | None:
    """What `npm view --json` and the registry answer about a package."""
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    tags, versions = document.get("dist-tags"), document.get("versions")
    if not isinstance(tags, dict) or not isinstance(versions, (list, dict)):
        return None
    times = document.get("time") if isinstance(document.get("time"), dict) else {}
    title = f"npm package {masked_line(document['name'], 60)}: {some(len(versions), 'version')}"
    latest = tags.get("latest")
    title += f", latest {masked_line(str(latest), 30)}" if latest else ""
    if isinstance(times, dict) and times.get("created"):
        title += f"; created {masked_line(str(times['created'])[:10], 10)}"
        title += f", modified {masked_line(str(times.get('modified', ''))[:10], 10)}"
    names = [masked_line(str(one), 24) for one in versions]
    ends = [*names[:3], "…", *names[-3:]] if len(names) > 6 else names
    sections = [
        Section("dist-tags: ", [f"{masked_line(tag, 30)} {masked_line(str(value), 30)}"
                                for tag, value in tags.items()], "tags", share=0.15),
        Section(f"versions: {', '.join(ends)}", [""], share=0.15),
    ]  # fmt: skip
    return Known(title, sections)


def _kubernetes(document: object) -> Known | None:
    """A list of Kubernetes objects: kinds, namespaces, phases."""
    if not isinstance(document, dict) or not isinstance(document.get("apiVersion"), str):
        return None
    kind = document.get("kind")
    items = document.get("items")
    if not isinstance(kind, str) or not isinstance(items, list) or not items:
        return None
    objects = [item for item in items if isinstance(item, dict)]
    kinds = Counter(str(item.get("kind") or kind.removesuffix("List")) for item in objects)
    metadata = [_mapping(item.get("metadata")) for item in objects]
    spaces = Counter(str(one["namespace"]) for one in metadata if one.get("namespace"))
    states = [_mapping(item.get("status")) for item in objects]
    phases = Counter(str(one["phase"]) for one in states if one.get("phase"))
    waiting = Counter(
        str(_mapping(_mapping(one.get("state")).get(state))["reason"])
        for status in states
        for one in _mappings(status.get("containerStatuses"))
        for state in ("waiting", "terminated")
        if _mapping(_mapping(one.get("state")).get(state)).get("reason")
    )
    names = [str(one["name"]) for one in metadata if one.get("name")]
    title = "Kubernetes " + ", ".join(
        f"{masked_line(name, 40)} {times}" for name, times in kinds.most_common(6)
    )
    title += f", +{len(kinds) - 6} more kinds" if len(kinds) > 6 else ""
    sections = [
        Section("namespaces: ", _counted(spaces), "namespaces", share=0.2),
        Section("phases: ", _counted(phases), "phases", share=0.15),
        Section("container reasons: ", _counted(waiting), "reasons", share=0.15),
        Section("names: ", [masked_line(name, 60) for name in names[:100]], "names", len(names),
                share=0.3),
    ]  # fmt: skip
    ask = 'query="$.items[*].metadata.name"'
    kept = [one for one in sections if one.items]
    return Known(title, kept, is_complete=True, ask=(ask, ""))


def _github(document: object) -> Known | None:
    """Lists of issues, pull requests, commits and workflow runs of GitHub."""
    items = document
    if isinstance(document, dict):
        items = next((document[key] for key in ("items", "workflow_runs") if key in document), None)
    if not isinstance(items, list) or not items or not isinstance(items[0], dict):
        return None
    first = items[0]
    if not any(str(first.get(key, "")).startswith("http") for key in ("html_url", "url")):
        return None
    objects = [item for item in items if isinstance(item, dict)]
    if "number" in first and "state" in first and "user" in first:
        pulls = sum("pull_request" in item or "head" in item for item in objects)
        nouns = [some(len(objects) - pulls, "issue")] if pulls < len(objects) else []
        nouns += [some(pulls, "pull request")] if pulls else []
        return _issues(objects, f"GitHub {', '.join(nouns)}")
    if "sha" in first and "commit" in first:
        authors = Counter(
            str(_mapping(_mapping(item.get("commit")).get("author")).get("name"))
            for item in objects
        )
        sections = [Section("authors: ", _counted(authors), "authors", share=0.2)]
        return Known(f"GitHub {some(len(objects), 'commit')}", sections)
    return None


def _issues(objects: Sequence[Mapping[str, Any]], nouns: str) -> Known:
    states = Counter(str(item.get("state")) for item in objects)
    numbers = [item["number"] for item in objects if isinstance(item.get("number"), int)]
    span = f", #{min(numbers)}-#{max(numbers)}" if numbers else ""
    listed = ", ".join(f"{masked_line(name, 20)} {times}" for name, times in states.most_common(4))
    authors = Counter(str(_mapping(item.get("user")).get("login")) for item in objects)
    labels = Counter(
        str(label.get("name")) for item in objects for label in _mappings(item.get("labels"))
    )
    titles = [
        f"#{item.get('number')} {safe(str(item.get('title', '')), _WORDS)}" for item in objects
    ]
    sections = [
        Section("authors: ", _counted(authors), "authors", share=0.15),
        Section("labels: ", _counted(labels), "labels", share=0.15),
        Section("titles: ", titles[:60], "titles", len(titles), share=0.25),
    ]
    return Known(f"{nouns}: {listed}{span}", [one for one in sections if one.items])


def _counted(counts: Counter[str]) -> list[str]:
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{safe(name, _NAMES)} {times}" for name, times in common]


def _strings(value: object) -> Iterable[str]:
    return (one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> Iterable[Mapping[str, Any]]:
    return (one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _notebook(document: object) -> Known | None:
    """A Jupyter notebook: its cells by type, its headings and errors."""
    if not isinstance(document, dict) or "nbformat" not in document:
        return None
    if not isinstance(document.get("cells"), list):
        return None
    cells = list(_mappings(document["cells"]))
    types = Counter(str(cell.get("cell_type")) for cell in cells)
    titles: list[str] = []
    errors: list[str] = []
    for cell in cells:
        source = cell.get("source") or ""
        written = "".join(map(str, source)) if isinstance(source, list) else str(source)
        lines = [each for each in written.split("\n") if each.startswith("#")]
        titles += [line.lstrip("# ") for line in lines if line.lstrip("#")[:1] == " "]
        outputs = _mappings(cell.get("outputs"))
        errors += [str(one.get("ename")) for one in outputs if one.get("output_type") == "error"]
    counted = ", ".join(f"{times} {masked_line(name, 20)}" for name, times in types.most_common())
    sections = [
        Section("errors: ", [masked_line(one, 60) for one in errors], "errors", share=0.3),
        Section("headings: ", [masked_line(one, 50) for one in titles], "headings"),
    ]
    return Known(
        f"notebook of {counted} cells",
        [one for one in sections if one.items],
        is_complete=True,
        ask=('query="$.cells[*].source"', ""),
    )


_KNOWN: Final[Sequence[Callable[[object], Known | None]]] = (
    _openapi, _npm, _kubernetes, _github, _notebook,
)  # fmt: skip
