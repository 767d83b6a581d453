"""A client's configuration as text, and its servers. An edit answers with a new text, and is proved first.

Each edit is made twice: in the text, and on the values that the text stands for. Where the new text does not stand for
the new values, the edit is refused: nothing is written that was not understood.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from coatcheck.errors import InvalidArgument
from coatcheck.install import jsonc, tomltext
from coatcheck.install.masking import masked_json, masked_toml


class Document(ABC):
    """The text of a configuration, whose servers stand at the path `section`. Raises `InvalidArgument`."""

    def __init__(self, text: str, section: tuple[str, ...]) -> None:
        self.text = text
        self.section = section
        self.value = self._parsed()
        servers: Any = self.value
        for key in section:
            servers = servers.get(key, {})
            if not isinstance(servers, dict):
                raise InvalidArgument(f"{key!r} in it is no object")
        self.servers: Mapping[str, Any] = servers

    def adding(self, name: str, entry: Mapping[str, Any]) -> Self:
        """With one more server."""

        def meant(servers: dict[str, Any]) -> None:
            servers[name] = dict(entry)

        return self._proved(self._adding(name, dict(entry)), meant)

    def removing(self, name: str) -> Self:
        """Without a server."""
        return self._proved(self._removing(name), lambda servers: servers.pop(name))

    def prefixing(self, name: str, command: str, words: list[str]) -> Self:
        """With a server whose command is another, and whose arguments have these words before them."""
        arguments = [*words, *self.servers[name].get("args", [])]

        def meant(servers: dict[str, Any]) -> None:
            servers[name] |= {"command": command, "args": arguments}

        return self._proved(self._prefixing(name, command, words, arguments), meant)

    def restoring(self, name: str, command: str, arguments: list[str] | None) -> Self:
        """With a server that has this command, and these arguments or none."""

        def meant(servers: dict[str, Any]) -> None:
            servers[name]["command"] = command
            servers[name].pop("args", None)
            if arguments is not None:
                servers[name]["args"] = arguments

        return self._proved(self._restoring(name, command, arguments), meant)

    def _proved(self, text: str, meant: Callable[[dict[str, Any]], object]) -> Self:
        wanted = copy.deepcopy(self.value)
        servers = wanted
        for key in self.section:
            servers = servers.setdefault(key, {})
        meant(servers)
        try:
            edited = type(self)(text, self.section)
        except InvalidArgument:
            edited = None
        if not servers and edited is not None and not edited.servers:
            wanted = edited.value if _without(edited.value, self.section) == _without(wanted, self.section) else wanted
        if edited is None or edited.value != wanted:
            raise InvalidArgument("it is written in a way that cannot be edited safely", hint="edit it by hand")
        return edited

    @abstractmethod
    def _parsed(self) -> dict[str, Any]: ...

    @abstractmethod
    def _adding(self, name: str, entry: dict[str, Any]) -> str: ...

    @abstractmethod
    def _removing(self, name: str) -> str: ...

    @abstractmethod
    def _prefixing(self, name: str, command: str, words: list[str], arguments: list[str]) -> str: ...

    @abstractmethod
    def _restoring(self, name: str, command: str, arguments: list[str] | None) -> str: ...

    @staticmethod
    @abstractmethod
    def line(name: str, entry: Mapping[str, Any]) -> str:
        """An entry on one line, for a person to put among the servers."""

    @abstractmethod
    def masked(self) -> str:
        """The text for showing, without secrets."""


class Json(Document):
    """Also with comments and trailing commas."""

    def _parsed(self) -> dict[str, Any]:
        root = jsonc.parse(self.text)
        if root is None:
            return {}
        if not isinstance(root.value, dict):
            raise InvalidArgument("it is no JSON object")
        holder: jsonc.Node | None = root
        for key in (*self.section, None):
            keys = [member.key for member in holder.members] if holder else []
            if (
                twice := next((one for one in keys if keys.count(one) > 1), None)
                if len(set(keys)) < len(keys)
                else None
            ):
                raise InvalidArgument(f"it has {twice[:80]!r} twice")
            member = holder.member(key) if holder and key is not None else None
            holder = member.node if member else None
        return root.value

    def rewriting(self, name: str, entry: Mapping[str, Any], *, written: str | None = None) -> Self:
        """With another entry in a server's place; as `written`, where that is how it stood once."""
        node = self._node(name)
        if written is not None and jsonc.parse(written) is not None:
            text = jsonc.spliced(self.text, [(node.start, node.end, written)])
        else:
            text = jsonc.replacing(self.text, node, dict(entry))
        return self._proved(text, lambda servers: servers.update({name: dict(entry)}))

    def written(self, name: str) -> str:
        """A server's entry as it stands."""
        node = self._node(name)
        return self.text[node.start : node.end]

    def without_section(self) -> Self:
        """Without the object of the servers, where that is empty."""
        if self.servers:
            return self
        root = jsonc.parse(self.text)
        holder = self._below(root, self.section[:-1])
        if holder is None or holder.member(self.section[-1]) is None:
            return self
        edited = type(self)(jsonc.removing(self.text, holder, self.section[-1]), self.section)
        return edited if not edited.servers else self

    def _adding(self, name: str, entry: dict[str, Any]) -> str:
        root = jsonc.parse(self.text)
        if root is None:
            whole: Any = {name: entry}
            for key in reversed(self.section):
                whole = {key: whole}
            return self.text + json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        holder, key, value = root, name, entry
        for index, part in enumerate(self.section):
            member = holder.member(part)
            if member is None:
                key = part
                for outer in reversed((*self.section[index + 1 :], name)):
                    value = {outer: value}
                break
            holder = member.node
        return jsonc.inserting(self.text, holder, key, value)

    def _removing(self, name: str) -> str:
        holder = self._below(jsonc.parse(self.text), self.section)
        assert holder is not None
        return jsonc.removing(self.text, holder, name)

    def _prefixing(self, name: str, command: str, words: list[str], arguments: list[str]) -> str:
        entry = self._node(name)
        old = entry.member("args")
        if old is None:
            text = jsonc.inserting(self.text, entry, "args", arguments)
        else:
            items = [json.dumps(word, ensure_ascii=False) for word in words]
            text = jsonc.prepending(self.text, old.node.start, items, is_empty=not old.node.items)
        return self._with_command(text, name, command)

    def _restoring(self, name: str, command: str, arguments: list[str] | None) -> str:
        entry = self._node(name)
        old = entry.member("args")
        text = self.text
        if old is not None and arguments is None:
            text = jsonc.removing(text, entry, "args")
        elif old is not None:
            kept = len(old.node.items) - len(arguments or ())
            if arguments and kept > 0 and [item.value for item in old.node.items[kept:]] == arguments:
                text = jsonc.spliced(text, [(old.node.items[0].start, old.node.items[kept].start, "")])
            else:
                text = jsonc.replacing(text, old.node, arguments)
        return self._with_command(text, name, command)

    def _with_command(self, text: str, name: str, command: str) -> str:
        member = type(self)(text, self.section)._node(name).member("command")
        if member is None:
            raise InvalidArgument(f"the server {name[:80]!r} has no command")
        return jsonc.replacing(text, member.node, command)

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
        return masked_json(self.text)


class Toml(Document):
    """Servers in tables of their own, or by dotted keys; those in inline tables can be read, not edited."""

    def _parsed(self) -> dict[str, Any]:
        value = tomltext.parse(self.text)
        list(tomltext.statements(self.text))
        return value

    def _adding(self, name: str, entry: dict[str, Any]) -> str:
        return tomltext.appending(self.text, (*self.section, name), entry)

    def _removing(self, name: str) -> str:
        return tomltext.removing(self.text, (*self.section, name))

    def _prefixing(self, name: str, command: str, words: list[str], arguments: list[str]) -> str:
        path = (*self.section, name)
        if "args" in self.servers[name]:
            is_empty = not self.servers[name]["args"]
            text = tomltext.prepending(self.text, (*path, "args"), words, is_empty=is_empty)
        else:
            text = tomltext.setting(self.text, (*path, "args"), arguments, after=(*path, "command"))
        return tomltext.setting(text, (*path, "command"), command)

    def _restoring(self, name: str, command: str, arguments: list[str] | None) -> str:
        path = (*self.section, name)
        text = tomltext.setting(self.text, (*path, "command"), command)
        if arguments is None:
            return tomltext.unsetting(text, (*path, "args"))
        return tomltext.setting(text, (*path, "args"), arguments, after=(*path, "command"))

    @staticmethod
    def line(name: str, entry: Mapping[str, Any]) -> str:
        return tomltext.line(name, dict(entry))

    def masked(self) -> str:
        return masked_toml(self.text)


def _without(value: dict[str, Any], section: tuple[str, ...]) -> dict[str, Any]:
    """The values without the object of the servers: TOML has no table where there is nothing in it."""
    key, *below = section
    rest = {one: item for one, item in value.items() if one != key}
    return rest if not below else {**rest, key: _without(value.get(key, {}), tuple(below))}


def document(text: str, format_: str, section: tuple[str, ...]) -> Json | Toml:
    """Raises `InvalidArgument`."""
    return Toml(text, section) if format_ == "toml" else Json(text, section)
