"""The text of a client's configuration: edit its servers, show it without secrets.

Each edit is made twice: in the text, and on the values that the text represents. An edit is refused if the new text
does not parse to the new values.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

from coatcheck.errors import InvalidArgument, MissingExtra
from coatcheck.install import jsonc
from coatcheck.redaction import mask

if TYPE_CHECKING:
    import tomlkit

_SECRET_KEYS: Final = frozenset({"env", "environment", "headers", "http_headers"})  # values below these are masked
_MASKED: Final = "[masked]"
_SETS_VARIABLE: Final = ("-e", "--env")  # of a container: the variable's name may not reveal that it is a secret
_QUERY: Final = re.compile(r"(https?://[^\s\"'?#]+\?)[^\s\"'#]+")
_JSON_COMMENT: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|(//[^\r\n]*|/\*.*?\*/)', re.DOTALL)


class ConfigText(ABC):
    """A configuration whose servers are at the path `section`. Raises `InvalidArgument` if it cannot be parsed.

    Edits return a new object."""

    def __init__(self, text: str, section: tuple[str, ...]) -> None:
        self.text = text
        self.section = section
        self.value = self._parse()
        servers: Any = self.value
        for key in section:
            servers = servers.get(key, {})
            if not isinstance(servers, dict):
                raise InvalidArgument(f"{key!r} is not an object")
        self.servers: Mapping[str, Any] = servers

    def add(self, name: str, entry: Mapping[str, Any]) -> Self:
        """Add a server."""
        return self._checked(self._add(name, dict(entry)), lambda servers: servers.update({name: dict(entry)}))

    def remove(self, name: str) -> Self:
        """Remove a server."""
        return self._checked(self._remove(name), lambda servers: servers.pop(name))

    def prefix(self, name: str, command: str, words: list[str]) -> Self:
        """Replace the command of a server, and put `words` before its arguments."""
        arguments = [*words, *self.servers[name].get("args", [])]
        edited = self._prefix(name, command, words, arguments)
        return self._checked(edited, lambda servers: servers[name].update(command=command, args=arguments))

    def restore(self, name: str, command: str, arguments: list[str] | None) -> Self:
        """Give a server this command and these arguments; None removes `args`."""

        def change(servers: dict[str, Any]) -> None:
            servers[name] |= {"command": command, "args": arguments}
            if arguments is None:
                del servers[name]["args"]

        return self._checked(self._restore(name, command, arguments), change)

    def _checked(self, text: str, change: Callable[[dict[str, Any]], object]) -> Self:
        """Parse the edited text and compare it with the same change made to the values."""
        wanted = copy.deepcopy(self.value)
        servers = wanted
        for key in self.section:
            servers = servers.setdefault(key, {})
        change(servers)
        try:
            edited = type(self)(text, self.section)
        except InvalidArgument:
            edited = None
        if not servers and edited is not None and not edited.servers:
            wanted = edited.value if _without(edited.value, self.section) == _without(wanted, self.section) else wanted
        if edited is None or edited.value != wanted:
            raise InvalidArgument("its formatting cannot be edited safely", hint="edit it by hand")
        return edited

    @abstractmethod
    def _parse(self) -> dict[str, Any]: ...

    @abstractmethod
    def _add(self, name: str, entry: dict[str, Any]) -> str: ...

    @abstractmethod
    def _remove(self, name: str) -> str: ...

    @abstractmethod
    def _prefix(self, name: str, command: str, words: list[str], arguments: list[str]) -> str: ...

    @abstractmethod
    def _restore(self, name: str, command: str, arguments: list[str] | None) -> str: ...

    @staticmethod
    @abstractmethod
    def line(name: str, entry: Mapping[str, Any]) -> str:
        """Render an entry on one line, for a person to paste among the servers."""

    @abstractmethod
    def masked(self) -> str:
        """Return the text with secrets masked, comments included."""


class JsonConfig(ConfigText):
    """JSON, with comments and trailing commas allowed."""

    def _parse(self) -> dict[str, Any]:
        root = jsonc.parse(self.text)
        if root is None:
            return {}
        if not isinstance(root.value, dict):
            raise InvalidArgument("it is not a JSON object")
        holder: jsonc.Node | None = root
        for key in (*self.section, None):
            keys = [member.key for member in holder.members] if holder else []
            if len(set(keys)) < len(keys):
                twice = next(one for one in keys if keys.count(one) > 1)
                raise InvalidArgument(f"it has the key {twice[:80]!r} twice")
            holder = self._below(holder, (key,)) if key is not None else None
        return root.value

    def rewrite(self, name: str, entry: Mapping[str, Any], *, written: str | None = None) -> Self:
        """Replace the entry of a server, by the text `written` if that is given."""
        node = self._node(name)
        if written is not None and jsonc.parse(written) is not None:
            text = jsonc.splice(self.text, [(node.start, node.end, written)])
        else:
            text = jsonc.replace(self.text, node, dict(entry))
        return self._checked(text, lambda servers: servers.update({name: dict(entry)}))

    def entry_text(self, name: str) -> str:
        """Return the entry of a server as written in the file."""
        node = self._node(name)
        return self.text[node.start : node.end]

    def without_section(self) -> Self:
        """Remove the object that contains the servers, if it is empty."""
        holder = self._below(jsonc.parse(self.text), self.section[:-1])
        if self.servers or holder is None or holder.member(self.section[-1]) is None:
            return self
        edited = type(self)(jsonc.remove(self.text, holder, self.section[-1]), self.section)
        return edited if not edited.servers else self

    def _add(self, name: str, entry: dict[str, Any]) -> str:
        root = jsonc.parse(self.text)
        path = (*self.section, name)
        if root is None:
            return self.text + json.dumps(_nested(path, entry), indent=2, ensure_ascii=False) + "\n"
        holder, depth = root, 0
        while depth < len(self.section) and (member := holder.member(path[depth])) is not None:
            holder, depth = member.node, depth + 1
        return jsonc.insert(self.text, holder, path[depth], _nested(path[depth + 1 :], entry))

    def _remove(self, name: str) -> str:
        holder = self._below(jsonc.parse(self.text), self.section)
        assert holder is not None
        return jsonc.remove(self.text, holder, name)

    def _prefix(self, name: str, command: str, words: list[str], arguments: list[str]) -> str:
        entry = self._node(name)
        old = entry.member("args")
        if old is None:
            text = jsonc.insert(self.text, entry, "args", arguments)
        else:
            text = jsonc.prepend(self.text, old.node, words)
        return self._with_command(text, name, command)

    def _restore(self, name: str, command: str, arguments: list[str] | None) -> str:
        entry = self._node(name)
        old = entry.member("args")
        text = self.text
        if old is not None and arguments is None:
            text = jsonc.remove(text, entry, "args")
        elif old is not None:
            kept = len(old.node.items) - len(arguments or ())
            if arguments and kept > 0 and [item.value for item in old.node.items[kept:]] == arguments:
                text = jsonc.splice(text, [(old.node.items[0].start, old.node.items[kept].start, "")])
            else:
                text = jsonc.replace(text, old.node, arguments)
        return self._with_command(text, name, command)

    def _with_command(self, text: str, name: str, command: str) -> str:
        member = type(self)(text, self.section)._node(name).member("command")
        if member is None:
            raise InvalidArgument(f"the server {name[:80]!r} has no command")
        return jsonc.replace(text, member.node, command)

    def _node(self, name: str) -> jsonc.Node:
        found = self._below(jsonc.parse(self.text), (*self.section, name))
        if found is None:
            raise InvalidArgument(f"there is no server {name[:80]!r}")
        return found

    @staticmethod
    def _below(node: jsonc.Node | None, path: tuple[str, ...]) -> jsonc.Node | None:
        for key in path:
            member = node.member(key) if node else None
            node = member.node if member else None
        return node

    @staticmethod
    def line(name: str, entry: Mapping[str, Any]) -> str:
        return json.dumps({name: entry}, ensure_ascii=False)[1:-1]

    def masked(self) -> str:
        root = jsonc.parse(self.text)
        splices: list[jsonc.Splice] = []
        todo = [root] if root else []
        while todo:
            node = todo.pop()
            for member in node.members:
                if member.key.lower() in _SECRET_KEYS:
                    splices += self._masks(member.node)
                else:
                    todo.append(member.node)
            todo += node.items
            splices += [
                (second.start, second.end, f'"{_MASKED}"')
                for first, second in pairwise(node.items)
                if _is_secret_argument(first.value, second.value)
            ]
        return _mask_text(jsonc.splice(self.text, splices))

    def _masks(self, node: jsonc.Node) -> Iterator[jsonc.Splice]:
        for leaf in jsonc.leaves(node):
            if leaf.value is not None and not isinstance(leaf.value, bool):
                yield (leaf.start, leaf.end, f'"{_MASKED}"')
        for match in _JSON_COMMENT.finditer(self.text, node.start, node.end):
            if match[1]:
                yield (*match.span(1), f"/* {_MASKED} */" if match[1].startswith("/*") else f"// {_MASKED}")


class TomlConfig(ConfigText):
    """TOML, edited by tomlkit. `tomllib` decides what the text means.

    tomlkit keeps every line, but moves tables of servers together if an array of tables separates them."""

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
        try:
            import tomlkit
            from tomlkit.exceptions import TOMLKitError
        except ImportError as error:
            raise MissingExtra("mcp") from error
        try:
            document = tomlkit.parse(self.text)
        except (TOMLKitError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"this TOML cannot be edited: {error}", hint="edit it by hand") from error
        if sorted(tomlkit.dumps(document).splitlines()) != sorted(self.text.splitlines()):
            raise InvalidArgument("this TOML cannot be edited without loss", hint="edit it by hand")
        return document

    def _edit(self, path: tuple[str, ...], edit: Callable[[Any], object]) -> str:
        """Return the text after `edit` has changed the table at `path`."""
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        document: Any = self._document()
        try:
            table = document
            for key in path:
                table = table[key]
            edit(table)
            return tomlkit.dumps(document)
        except (TOMLKitError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise InvalidArgument("its formatting cannot be edited safely", hint="edit it by hand") from error

    def _add(self, name: str, entry: dict[str, Any]) -> str:
        import tomlkit

        eol = "\r\n" if "\r\n" in self.text else "\n"
        header = f"[{tomlkit.key([*self.section, name]).as_string()}]"
        lines = [header, *(_toml_line(key, value) for key, value in entry.items())]
        return self.text + (eol if self.text else "") + eol.join(lines) + eol

    def _remove(self, name: str) -> str:
        text = self._edit(self.section, lambda servers: servers.pop(name))
        if self.text.startswith(text):  # it was the last: the blank line that `_add` writes goes too
            text = re.sub(r"(?<=\n)\r?\n\Z", "", text)
        return text

    def _prefix(self, name: str, command: str, words: list[str], arguments: list[str]) -> str:
        def edit(entry: Any) -> None:
            entry["command"] = command
            if "args" not in entry:
                entry["args"] = arguments
                return
            for index, word in enumerate(words):
                entry["args"].insert(index, word)

        return self._edit((*self.section, name), edit)

    def _restore(self, name: str, command: str, arguments: list[str] | None) -> str:
        def edit(entry: Any) -> None:
            entry["command"] = command
            added = len(entry.get("args", [])) - len(arguments or ())
            if arguments is None:
                entry.pop("args", None)
            elif arguments and added > 0 and list(entry["args"])[added:] == arguments:
                for _ in range(added):
                    del entry["args"][0]
            else:
                entry["args"] = arguments

        return self._edit((*self.section, name), edit)

    @staticmethod
    def line(name: str, entry: Mapping[str, Any]) -> str:
        import tomlkit

        table = tomlkit.inline_table()
        table.update(entry)
        return _toml_line(name, table)

    def masked(self) -> str:
        import tomlkit

        document = self._document()
        _mask_toml(document, is_secret=False)
        return _mask_text(tomlkit.dumps(document))


def _toml_line(key: str, value: Any) -> str:
    import tomlkit

    return f"{tomlkit.key(key).as_string()} = {tomlkit.item(value).as_string()}"


def _mask_toml(container: Any, *, is_secret: bool) -> None:
    """Mask the secrets in a tomlkit container, in place."""
    from tomlkit import items

    for key, item in list(container.body):
        if isinstance(item, items.Whitespace | items.Null):
            continue
        below = is_secret or (key is not None and key.key.lower() in _SECRET_KEYS)
        if below and item.trivia.comment:
            item.trivia.comment = f"# {_MASKED}"
        if (masked := _masked_item(item, is_secret=below)) is not item:
            container[key] = masked


def _masked_item(item: Any, *, is_secret: bool) -> Any:
    from tomlkit import item as new_item
    from tomlkit import items

    if isinstance(item, items.Table | items.InlineTable):
        _mask_toml(item.value, is_secret=is_secret)
    elif isinstance(item, items.AoT):
        for table in item.body:
            _masked_item(table, is_secret=is_secret)
    elif isinstance(item, items.Array) and not is_secret:
        for index, one in enumerate(list(item)):
            if index and _is_secret_argument(item[index - 1], one):
                item[index] = _MASKED
            else:
                _masked_item(one, is_secret=False)
    elif is_secret and not isinstance(item, items.Comment | items.Bool):
        return new_item([_MASKED] * len(item) if isinstance(item, items.Array) else _MASKED)
    return item


def _is_secret_argument(flag: object, value: object) -> bool:
    """Whether `value` is a secret because of the option before it, such as `--api-key`."""
    if not isinstance(flag, str) or not flag.startswith("-") or not isinstance(value, str) or not value:
        return False
    return (flag in _SETS_VARIABLE and "=" in value) or value not in mask(f'"{flag}", "{value}"')[len(flag) + 2 :]


def _mask_text(text: str) -> str:
    return mask(_QUERY.sub(rf"\1{_MASKED}", text))


def _nested(path: tuple[str, ...], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _without(value: dict[str, Any], section: tuple[str, ...]) -> dict[str, Any]:
    """Return the values without the object of the servers: TOML drops a table when it is empty."""
    key, *below = section
    rest = {one: item for one, item in value.items() if one != key}
    return rest if not below else {**rest, key: _without(value.get(key, {}), tuple(below))}


def config_text(text: str, format_: str, section: tuple[str, ...]) -> JsonConfig | TomlConfig:
    """Parse a configuration. Raises `InvalidArgument`."""
    return TomlConfig(text, section) if format_ == "toml" else JsonConfig(text, section)
