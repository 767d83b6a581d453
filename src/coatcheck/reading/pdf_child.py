"""Inside the child process that reads PDF: number of pages, title, and the text of some pages."""

from __future__ import annotations

import io
import logging
import os
from typing import Final

import pypdf
from pypdf.errors import LimitReachedError, PyPdfError

from coatcheck.reading.confined import Message, Refused, allow, serve

_MARGIN: Final = 1 << 30
_TOLD: Final = ("title", "author", "subject", "creator")


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
            return _look(file, message)
        except LimitReachedError as error:
            raise Refused("limit", "the PDF unpacks to more than is allowed", "ask for other pages") from error
        except RecursionError as error:
            raise Refused("limit", "the PDF is nested too deeply to be read") from error
        except (PyPdfError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # A file that is not what it claims to be surprises the reader in every way there is.
            raise Refused("invalid", f"the PDF cannot be read: {type(error).__name__}: {error}"[:300]) from error


def _look(file: io.BufferedReader, message: Message) -> Message:
    reader = pypdf.PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        return {"pages": 0, "encrypted": True, "about": {}, "texts": []}
    total = len(reader.pages)
    about = {key: str(value)[:200] for key in _TOLD if (value := getattr(reader.metadata, key, None))}
    told: Message = {"pages": total, "encrypted": reader.is_encrypted, "about": about, "texts": [], "more": False}
    size = 0
    for number in range(message["first"], min(message["last"], total) + 1 if message["last"] else 0):
        text = reader.pages[number - 1].extract_text()
        if size + len(text) > message["chars"]:
            told["texts"].append([number, text[: message["chars"] - size]])
            told["more"] = True
            break
        size += len(text)
        told["texts"].append([number, text])
    return told


def _warm() -> None:
    """Read a page once: what the library imports on demand must be there before files are out of reach."""
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    page = io.BytesIO()
    writer.write(page)
    pypdf.PdfReader(page).pages[0].extract_text()
