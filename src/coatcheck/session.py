"""`Session`: the object that users work with. It adds to the storage verbs of `CoreSession` those
that look inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from coatcheck.content import Content
from coatcheck.core_session import CoreSession
from coatcheck.refs import Ref

if TYPE_CHECKING:
    from coatcheck.externalize import Outcome, Policy, ResultSource, Situation
    from coatcheck.previews import Preview
    from coatcheck.reading import Page
    from coatcheck.truncation import Truncation


class Session(CoreSession):
    """The scope in which pointers and names resolve: artifacts that it put or was granted, and
    those of its ancestors.

    Created by `store.session(…)`. A session object is cheap, has no connection, and can be shared
    between threads."""

    __slots__ = ()

    def read(
        self,
        target: Ref | str,
        *,
        lines: str | None = None,
        chars: str | None = None,
        grep: str | None = None,
        context: int | Literal["auto"] | None = None,
        ignore_case: bool = False,
        invert: bool = False,
        literal: bool = False,
        count: bool = False,
        last: bool = False,
        query: str | None = None,
        diff: str | None = None,
        code: str | None = None,
        exact: bool = False,
        cursor: str | None = None,
        max_chars: int | None = None,
    ) -> Page:
        """Read one page of an artifact, at most `max_chars` characters (by default the setting
        `page.max_chars`, 8,000), with a cursor for the next.

        `lines="4100:4160"`, `"-50:"` or `"10:40,200:220"` and `chars="0:2000"` are slices. `grep`
        is a regular expression in RE2 syntax (or `literal` text), with `context` lines around each
        match; by default 2 in indented JSON and accessibility snapshots, else none, and "auto" adds
        as many as a short page has room for. `count` gives numbers alone, and `last` begins with
        the last matches. `query` is `"shape"`, a JSONPath, DuckDB SQL on the tables of the
        artifact, or `"text"` of a document. `diff` is another artifact to compare with. `code` is a
        Python program over the whole content: it finds `text`, `lines` and `data` (JSON or rows),
        and the page is what it prints, with its last value (extra `programs`). Lines are shown as
        on a terminal, without colours and with progress bars in their final state, unless `exact`.
        Raises `NotFound`, `Expired` and `InvalidArgument`, with messages that a model can act
        on."""
        from coatcheck.reading import (
            Request,
            read,
        )  # here and below, so that importing coatcheck stays quick

        request = Request(
            lines=lines, chars=chars, grep=grep, context=context, ignore_case=ignore_case,
            invert=invert, literal=literal, count=count, last=last, query=query, diff=diff,
            code=code, exact=exact,
            max_chars=self.store.settings["page.max_chars"] if max_chars is None else max_chars,
        )  # fmt: skip
        if request.code is not None:
            from coatcheck import programs

            return programs.read(self, target, request, cursor)
        return read(self, target, request, cursor)

    def preview(self, target: Ref | str, *, limit: int = 200) -> Preview:
        """Return a short preview of an artifact: its shape, columns, levels, outline or size, else
        head and tail."""
        from coatcheck.reading import preview_of

        return preview_of(self.content(target), limit=limit)

    def externalize(
        self,
        value: object,
        *,
        tool: str | None = None,
        call_id: str | None = None,
        policy: Policy | None = None,
        situation: Situation | None = None,
        arguments: Mapping[str, Any] | None = None,
        source: ResultSource | None = None,
        cut: Truncation | None = None,
    ) -> Outcome:
        """Return what a model should get for a tool's result: the value itself if the policy lets
        it stay, else a stub. Without a limit, a policy decides by expected cost; `situation` is
        what the host knows of the conversation. The beginning of the call's `arguments` is kept in
        the metadata of the artifact, for people who look at lists. `source` is where the result
        enters, for `coatcheck.context.savings`; by default the library. `cut` is what the host
        knows to be missing from the value; markers of known hosts and servers in the value itself
        are recognised.

        Mixed content (lists of text, image and document blocks, as dicts, SDK objects or MCP
        results) is decided block by block, images by their pixels. A `Ref` or a binary stream
        counts as the value behind it. If the store fails, the outcome is a bounded head and tail
        that says so, and no error is raised."""
        from coatcheck.externalize import externalize

        return externalize(
            self,
            value,
            tool=tool,
            call_id=call_id,
            policy=policy,
            situation=situation,
            arguments=arguments,
            source=source,
            cut=cut,
        )

    def offload(
        self,
        call: Callable[..., Any] | None = None,
        *,
        tool: str | None = None,
        policy: Policy | None = None,
    ) -> Callable[..., Any]:
        """Decorate a function so that its results are externalized; small values pass unchanged.
        With or without arguments. The function keeps its name and signature; a coroutine function
        stays one."""
        from coatcheck.externalize.functions import offloaded

        if call is None:
            return lambda function: offloaded(self.externalize, function, tool, policy)
        return offloaded(self.externalize, call, tool, policy)

    def _part(self, content: Content, fragment: str) -> bytes:
        from coatcheck.reading.heavy import part

        return part(content, fragment)
