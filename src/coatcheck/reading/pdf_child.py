"""The child process that reads PDF: number of pages, metadata, and the text of some pages."""

from __future__ import annotations

import codecs
import encodings
import importlib
import io
import logging
import os
import pkgutil
from contextlib import suppress
from typing import Final

import pypdf
from pypdf.errors import DependencyError, LimitReachedError

from coatcheck.reading.sandbox import Message, Refused, allow, serve

_MARGIN: Final = 1 << 30
_METADATA: Final = ("title", "author", "subject", "creator")


def main(folder: str) -> None:
    logging.disable()
    _warm()
    serve(folder, lambda message: answer(message, folder), lambda: None)


def answer(message: Message, folder: str) -> Message:
    allow(message["memory"] + _MARGIN, message["seconds"], 1)
    path = os.path.join(folder, message["files"][0])
    with open(path, "rb") as file:
        os.unlink(path)
        try:
            return _read(file, message)
        except LimitReachedError as error:
            raise Refused("limit", "the PDF unpacks to more than the limit", "ask for other pages") from error
        except RecursionError as error:
            raise Refused("limit", "the PDF is nested too deeply to read") from error
        except DependencyError as error:
            raise Refused(
                "invalid", f"the PDF cannot be read: {error}"[:4_000], "install the package that it names"
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # a malformed file can raise anything
            raise Refused("invalid", f"the PDF cannot be read: {type(error).__name__}: {error}"[:4_000]) from error


def _read(file: io.BufferedReader, message: Message) -> Message:
    reader = pypdf.PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        return {"pages": 0, "encrypted": True, "about": {}, "texts": []}
    total = len(reader.pages)
    about = {key: str(value)[:200] for key in _METADATA if (value := getattr(reader.metadata, key, None))}
    found: Message = {"pages": total, "encrypted": reader.is_encrypted, "about": about, "texts": [], "more": False}
    size = 0
    for number in range(message["first"], min(message["last"], total) + 1 if message["last"] else 0):
        text = reader.pages[number - 1].extract_text()
        if size + len(text) > message["chars"]:
            found["texts"].append([number, text[: message["chars"] - size]])
            found["more"] = True
            break
        size += len(text)
        found["texts"].append([number, text])
    return found


def _warm() -> None:
    """Import all that the library may import on demand, since a confined process can open no module. A PDF can use any
    character encoding, so every codec is loaded too, and a page is read once."""
    for module in pkgutil.walk_packages(pypdf.__path__, "pypdf."):
        with suppress(ImportError):  # it needs a package that is not installed
            importlib.import_module(module.name)
    for codec in pkgutil.iter_modules(encodings.__path__):
        with suppress(LookupError, ImportError):  # for another platform
            codecs.lookup(codec.name)
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    page = io.BytesIO()
    writer.write(page)
    pypdf.PdfReader(page).pages[0].extract_text()
