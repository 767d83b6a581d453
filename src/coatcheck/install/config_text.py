"""The text of a client's configuration: edit its servers, show it without secrets.

Everything outside an edit stays as written. An edit is refused if the new text does not parse to
the new values.
"""

from __future__ import annotations

import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

from coatcheck.errors import InvalidArgument, needs_extra
from coatcheck.redaction import mask

if TYPE_CHECKING:
    import tomlkit

_BOM: Final = "\ufeff"
_SECRET_KEYS: Final = frozenset(
    {"env", "environment", "headers", "http_headers"}
)  # values below these are masked
_MASKED: Final = "[masked]"
_SETS_VARIABLE: Final = (
    "-e",
    "--env",
)  # of a container: the variable's name may not reveal that it is a secret
_QUERY: Final = re.compile(r"(https?://[^\s\"'?#]+\?)[^\s\"'#]+")
_STRING: Final = r'"(?:[^"\\]|\\.)*+"'
_COMMENT: Final = re.compile(_STRING + r"|(//[^\r\n]*|/\*.*?\*/)", re.DOTALL)
_LAST_COMMA: Final = re.compile(_STRING + r"|[\[{]\s*,|(,)(?=\s*[}\]])", re.DOTALL)
_TRIVIA: Final = re.compile(r"(?:[ \t\r\n]+|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_NEW_LINE: Final = re.compile(r"[ \t]*(\r?\n[ \t]*)")
_LINE_START: Final = re.compile(r"(?:\r?\n)?[ \t]*\Z")
_Path = tuple[str, ...]


class ConfigText(ABC):
    """A configuration whose servers are at the path `section`. Raises `InvalidArgument` if it
    cannot be parsed."""

    def __init__(self, text: str, section: _Path) -> None:
        self._bom = _BOM if text.startswith(_BOM) else ""
        self.text = text.removeprefix(_BOM)
        self.section = section
        self.value = self._parse()
        servers: Any = self.value
        for key in section:
            servers = servers.get(key, {})
            if not isinstance(servers, dict):
                raise InvalidArgument(f"{key!r} is not an object")
        self.servers: dict[str, Any] = servers
        self.has_section = _with(self.value, section, servers) == self.value
        self.data = text.encode()

    def with_server(
        self, name: str, entry: Mapping[str, Any] | None, *, written: str | None = None
    ) -> Self:
        """Add or change a server, or remove it with None. `written` is the text of its entry, if
        that is known."""
        servers = {**self.servers, name: entry}
        if entry is None:
            del servers[name]
        try:
            edited = type(self)(self._bom + self._edited(name, servers, written), self.section)
            others = [_with(one.value, one.section, {}) for one in (self, edited)]
            if edited.servers == servers and others[0] == others[1]:
                return edited
        except (InvalidArgument, RecursionError):
            pass
        raise InvalidArgument("its formatting cannot be edited safely", hint="edit it by hand")

    @abstractmethod
    def _parse(self) -> dict[str, Any]: ...

    @abstractmethod
    def _edited(self, name: str, servers: dict[str, Any], written: str | None) -> str:
        """Return the text with these servers, of which `name` has changed."""

    @abstractmethod
    def masked(self) -> str:
        """Return the text with secrets masked, comments included."""

    def line(self, name: str, entry: Mapping[str, Any]) -> str:
        """Render an entry on one line, for a person to paste among the servers."""
        return f"{_dumps(name)}: {_dumps(entry)}"


def config_text(text: str, format_: str, section: _Path) -> ConfigText:
    """Parse a configuration. Raises `InvalidArgument`."""
    return TomlConfig(text, section) if format_ == "toml" else JsonConfig(text, section)


def _with(value: Mapping[str, Any], path: _Path, new: Any) -> Any:
    """Return nested objects with another value at a path."""
    return {**value, path[0]: _with(value.get(path[0], {}), path[1:], new)} if path else new


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys that are new, gone, or have another value."""
    return [
        key for key in {**new, **old} if key not in old or key not in new or old[key] != new[key]
    ]


def _gained(old: object, new: object) -> int:
    """Return how many items a list has gained at its beginning, negative for lost ones, or 0 if it
    differs in another way."""
    if not isinstance(old, list) or not isinstance(new, list):
        return 0
    count = len(new) - len(old)
    is_end = new[count:] == old if count > 0 else bool(new) and old[-count:] == new
    return count if is_end else 0


def _is_secret_argument(flag: object, value: object) -> bool:
    """Whether `value` is a secret because of the option before it, such as `--api-key`."""
    if (
        not isinstance(flag, str)
        or not flag.startswith("-")
        or not isinstance(value, str)
        or not value
    ):
        return False
    return (flag in _SETS_VARIABLE and "=" in value) or value not in mask(f'"{flag}", "{value}"')[
        len(flag) + 2 :
    ]


def _mask_text(text: str) -> str:
    return mask(_QUERY.sub(rf"\1{_MASKED}", text))


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _eol(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


class TomlConfig(ConfigText):
    """TOML, edited by tomlkit. `tomllib` decides what the text means.

    tomlkit keeps every line, but moves tables of servers together if an array of tables separates
    them."""

    def _parse(self) -> dict[str, Any]:
        try:
            value = tomllib.loads(self.text.replace("\r\n", "\n"))
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgument(f"invalid TOML: {error}") from error
        except RecursionError as error:
            raise InvalidArgument("invalid TOML: nested too deeply") from error
        self._document()
        return value

    def _document(self) -> tomlkit.TOMLDocument:
        with needs_extra("mcp"):
            import tomlkit
        try:
            document = tomlkit.parse(self.text)
        except Exception as error:  # it raises errors of many kinds, here and below
            raise InvalidArgument(
                f"this TOML cannot be edited: {error}", hint="edit it by hand"
            ) from error
        if sorted(document.as_string().splitlines()) != sorted(self.text.splitlines()):
            raise InvalidArgument("this TOML cannot be edited without loss", hint="edit it by hand")
        return document

    def _edited(self, name: str, servers: dict[str, Any], written: str | None) -> str:
        if name not in self.servers:
            eol = _eol(self.text)
            pairs = [
                f"{key} = {_dumps(value)}" for key, value in servers[name].items()
            ]  # JSON strings, lists of them
            lines = [f"[{'.'.join(self.section)}.{name}]", *pairs]
            return self.text + (eol if self.text else "") + eol.join(lines) + eol
        document: Any = self._document()
        table = document
        try:
            for key in self.section:
                table = table[key]
            _edit_toml(table, self.servers, servers)
        except Exception as error:
            raise InvalidArgument(str(error)) from error
        text: str = document.as_string()
        if name not in servers and self.text.startswith(text):  # the blank line before it goes too
            text = re.sub(r"(?<=\n)\r?\n\Z", "", text)
        return text

    def line(self, name: str, entry: Mapping[str, Any]) -> str:
        return re.sub(r'"([\w-]+)": ', r"\1 = ", super().line(name, entry))

    def masked(self) -> str:
        document = self._document()
        _mask_toml(document, is_secret=False)
        return _mask_text(document.as_string())


def _edit_toml(table: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for key in _differing(old, new):
        gained = _gained(old.get(key), new.get(key))
        if key not in new:
            table.pop(key)
        elif isinstance(old.get(key), dict) and isinstance(new[key], dict):
            _edit_toml(table[key], old[key], new[key])
        elif gained < 0:
            del table[key][:-gained]
        elif gained == 0:
            table[key] = new[key]
        for index in range(gained):
            table[key].insert(index, new[key][index])


def _mask_toml(item: Any, *, is_secret: bool) -> None:
    """Mask the secrets in a tomlkit document or item, in place. `is_secret` means that every value
    in a table is one."""
    from tomlkit import items

    if isinstance(item, items.AoT):
        for table in item.body:
            _mask_toml(table, is_secret=is_secret)
    elif isinstance(item, items.Array):
        _mask_toml_array(item)
    elif isinstance(item, items.Table | items.InlineTable):
        _mask_toml_container(item.value, is_secret=is_secret)
    elif hasattr(item, "body"):  # the document, or a table that is written in several places
        _mask_toml_container(item, is_secret=is_secret)


def _mask_toml_array(array: Any) -> None:
    for index, value in enumerate(list(array)):
        if index > 0 and _is_secret_argument(array[index - 1], value):
            array[index] = _MASKED
        else:
            _mask_toml(value, is_secret=False)


def _mask_toml_container(container: Any, *, is_secret: bool) -> None:
    from tomlkit import items

    for key, value in list(container.body):
        if isinstance(value, items.Whitespace | items.Null):
            continue
        has_secret_key = key is not None and key.key.lower() in _SECRET_KEYS
        if not is_secret and not has_secret_key:
            _mask_toml(value, is_secret=False)
            continue
        if value.trivia.comment:
            value.trivia.comment = f"# {_MASKED}"
        if isinstance(value, items.Table | items.InlineTable | items.AoT):
            _mask_toml(value, is_secret=True)
        elif isinstance(value, items.Array):
            container[key] = items.item([_MASKED] * len(value))
        elif not isinstance(value, items.Comment | items.Bool):
            container[key] = items.item(_MASKED)


class JsonConfig(ConfigText):
    """JSON, with comments and trailing commas allowed."""

    def _parse(self) -> dict[str, Any]:
        self._json = JsonText(self.text)
        if self._json.root is None:
            return {}
        if not isinstance(self._json.root.value, dict):
            raise InvalidArgument("it is not a JSON object")
        for depth in range(len(self.section) + 1):
            keys = [
                child.key for child in self._json.children(self._json.find(self.section[:depth]))
            ]
            if twice := [str(key) for key in keys if keys.count(key) > 1]:
                raise InvalidArgument(f"it has the key {twice[0][:80]!r} twice")
        return self._json.root.value

    def without_section(self) -> ConfigText:
        """Remove the object that contains the servers, if it is empty. In TOML it disappears by
        itself."""
        if self.servers or not self.has_section:
            return self
        return type(self)(self._bom + _removed(self.text, self.section), self.section)

    def entry_text(self, name: str) -> str:
        """Return the entry of a server as written in the file."""
        node, _ = _located(self.text, (*self.section, name))
        return self.text[node.start : node.end]

    def _edited(self, name: str, servers: dict[str, Any], written: str | None) -> str:
        wanted = _with(self.value, self.section, servers)
        if self._json.root is None:
            return self.text + json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
        if written is not None and (node := self._json.find((*self.section, name))) is not None:
            return _spliced(self.text, [(node.start, node.end, written)])
        return _edit_json(self.text, (), self.value, wanted)

    def masked(self) -> str:
        masks: dict[int, _Splice] = {}  # by position: a value may be secret for two reasons
        for node in self._json.walk(self._json.root):
            secrets = self._secret_arguments(node)
            if node.key is not None and node.key.lower() in _SECRET_KEYS:
                secrets += self._scalars(node)
                for splice in self._masked_comments(node):
                    masks[splice[0]] = splice
            for secret in secrets:
                masks[secret.start] = (secret.start, secret.end, f'"{_MASKED}"')
        return _mask_text(_spliced(self.text, list(masks.values())))

    def _secret_arguments(self, node: Node) -> list[Node]:
        """Return the items of an array that are secret because of the option before them."""
        if not isinstance(node.value, list):
            return []
        found: list[Node] = []
        for flag, argument in pairwise(self._json.children(node)):
            if _is_secret_argument(flag.value, argument.value):
                found.append(argument)
        return found

    def _scalars(self, node: Node) -> list[Node]:
        """Return the strings and numbers in a value, at any depth."""
        return [
            one
            for one in self._json.walk(node)
            if not isinstance(one.value, dict | list | bool | None)
        ]

    def _masked_comments(self, node: Node) -> Iterator[_Splice]:
        """Replace the comments in a value."""
        for match in _COMMENT.finditer(self.text, node.start, node.end):
            comment = match[1]
            if not comment:
                continue
            new = f"/* {_MASKED} */" if comment.startswith("/*") else f"// {_MASKED}"
            yield match.start(), match.end(), new


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its position in the text. A member of an object has a key, which starts at
    `begin`."""

    begin: int
    start: int
    end: int
    value: Any
    key: str | None = None


class JsonText:
    """JSON with comments and trailing commas. `root` is None if there is no value. Raises
    `InvalidArgument`."""

    def __init__(self, text: str) -> None:
        def blank(match: re.Match[str]) -> str:
            return re.sub(r"[^\r\n]", " ", match[0]) if match[1] else match[0]

        self._plain = _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))  # of the same length
        start, end = _skip(text, 0), len(self._plain.rstrip())
        try:
            value = json.loads(self._plain) if start < len(text) else None
        except RecursionError as error:
            raise InvalidArgument("invalid JSON: nested too deeply") from error
        except ValueError as error:
            line = getattr(error, "lineno", 1)
            raise InvalidArgument(
                f"invalid JSON in line {line}: {getattr(error, 'msg', error)}"
            ) from error
        self.root = Node(start, start, end, value) if start < len(text) else None

    def children(self, node: Node | None) -> list[Node]:
        """Return the members of an object or the items of an array."""
        found: list[Node] = []
        if node is None or not isinstance(node.value, dict | list):
            return found
        decoder, plain = json.JSONDecoder(), self._plain
        at = _skip(plain, node.start + 1)
        while at < node.end - 1:
            begin, key = at, None
            if isinstance(node.value, dict):
                key, at = decoder.raw_decode(plain, at)
                at = _skip(plain, _skip(plain, at) + 1)
            value, end = decoder.raw_decode(plain, at)
            found.append(Node(begin, at, end, value, key))
            at = _skip(plain, end)
            at = _skip(plain, at + 1) if plain[at] == "," else at
        return found

    def find(self, path: _Path) -> Node | None:
        node = self.root
        for key in path:
            node = next((child for child in self.children(node) if child.key == key), None)
        return node

    def walk(self, node: Node | None) -> Iterator[Node]:
        """Yield a node and all nodes below it."""
        todo = [node] if node else []
        while todo:
            yield (one := todo.pop())
            todo += self.children(one)


_Splice = tuple[int, int, str]


def _spliced(text: str, splices: Sequence[_Splice]) -> str:
    """Replace parts of the text. Insertions at the same position keep their order."""
    for start, end, new in sorted(splices, key=lambda splice: splice[0])[::-1]:
        text = text[:start] + new + text[end:]
    return text


def _located(text: str, path: _Path) -> tuple[Node, list[Node]]:
    """Return the value at a path, and its members or items."""
    document = JsonText(text)
    found = document.find(path)
    assert found is not None
    return found, document.children(found)


def _edit_json(text: str, path: _Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Change the object at a path from `old` to `new`."""
    for key in _differing(old, new):
        place = (*path, key)
        if key not in new:
            text = _removed(text, place)
        elif key not in old:
            text = _inserted(text, place, new[key])
        elif isinstance(old[key], dict) and isinstance(new[key], dict):
            text = _edit_json(text, place, old[key], new[key])
        else:
            text = _replaced(text, place, new[key])
    return text


def _inserted(text: str, path: _Path, value: Any) -> str:
    """Append a member to an object."""
    (holder, members), key, eol = _located(text, path[:-1]), _dumps(path[-1]), _eol(text)
    end = len(text[: holder.end - 1].rstrip())  # after all comments
    if not members:
        if (
            "\n" not in text.strip() and len(text.strip()) > holder.end - holder.start
        ):  # a one-line document stays one
            return _spliced(text, [(holder.end - 1, holder.end - 1, f"{key}: {_dumps(value)}")])
        outer = _indentation(text, holder.start)
        new = f"{key}: {_rendered(text, value, outer + _unit(text))}"
        return _spliced(
            text, [(end, holder.end - 1, f"{eol}{outer}{_unit(text)}{new}{eol}{outer}")]
        )
    first, last = members[0].begin, members[-1].end
    indent = text[text.rfind("\n", 0, first) + 1 : first]
    if indent.strip(" \t") or "\n" not in text[:first]:  # on one line
        return _spliced(text, [(last, last, f", {key}: {_dumps(value)}")])
    new = f"{eol}{indent}{key}: {_rendered(text, value, indent)}"
    if text[_skip(text, last)] == ",":
        return _spliced(text, [(end, end, new + ",")])
    return _spliced(text, [(last, last, ","), (end, end, new)])


def _removed(text: str, path: _Path) -> str:
    """Remove a member of an object, with its comma and its line."""
    holder, members = _located(text, path[:-1])
    index = [one.key for one in members].index(path[-1])
    member = members[index]
    line = _LINE_START.search(text, holder.start + 1, member.begin)
    assert line is not None
    start, after = line.start(), _skip(text, member.end)
    comma: list[_Splice] = []
    if index and text[start - 1] == ",":  # as `_inserted` writes it
        start -= 1
    elif text[after] == ",":
        comma = [(after, after + 1, "")]
    elif index:
        before = _skip(text, members[index - 1].end)
        comma = [(before, before + 1, "")]
    removed = _spliced(text, [(start, member.end, ""), *comma])
    end = holder.end - (len(text) - len(removed))
    if len(members) == 1 and not removed[holder.start + 1 : end - 1].strip():
        return removed[: holder.start + 1] + removed[end - 1 :]
    return removed


def _replaced(text: str, path: _Path, value: Any) -> str:
    """Replace a value; the new one spans several lines if the old one did. Unchanged items at the
    end of a list keep their text, and new ones before them each get a line if the first item has
    one."""
    node, items = _located(text, path)
    gained, at = _gained(node.value, value), node.start + 1
    if gained < 0:
        return _spliced(text, [(items[0].start, items[-gained].start, "")])
    if gained > 0:
        words, line = [_dumps(one) for one in value[:gained]], _NEW_LINE.match(text, at)
        if not items:
            return _spliced(text, [(at, at, ", ".join(words))])
        return _spliced(
            text,
            [(at, at, "".join(f"{line[1]}{word}," if line else f"{word}, " for word in words))],
        )
    is_long = "\n" in text[node.start : node.end]
    new = _rendered(text, value, _indentation(text, node.start)) if is_long else _dumps(value)
    return _spliced(text, [(node.start, node.end, new)])


def _rendered(text: str, value: Any, indent: str) -> str:
    return json.dumps(value, indent=_unit(text), ensure_ascii=False).replace(
        "\n", _eol(text) + indent
    )


def _unit(text: str) -> str:
    """One indentation step of the document."""
    match = re.search(r"^([ \t]+)\"", text, re.MULTILINE)
    return match[1] if match and len(match[1]) <= 8 else "  "


def _indentation(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _skip(text: str, at: int) -> int:
    """Skip whitespace and comments."""
    match = _TRIVIA.match(text, at)
    assert match is not None
    return match.end()
