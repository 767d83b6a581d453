"""Draw the pictures of the documentation: `python -m examples.pictures` draws docs/terminal.svg and
docs/console-*.png.

The terminal shows the commands below, run in a new store on a pseudo-terminal. Text that differs
between runs is replaced: ages, versions, the free disk space and the folder. `console_pictures`
draws the console.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from examples import shop

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURE = DOCS / "terminal.svg"
COLUMNS = 100
COMMANDS = (
    "coatcheck put checkout.log --tool fetch_log",
    "coatcheck put orders.csv --tool export_orders",
    "coatcheck ls",
    "coatcheck read checkout.log --grep 'WARN|ERROR' -C 1 --lines :500",
    "coatcheck read orders.csv --query 'SELECT status, count(*), sum(cents) FROM artifact GROUP BY 1'",
    "coatcheck doctor",
)
REPLACED = (
    (r"\b\d s\b", "1 s"),
    (r"coatcheck \d[\w.]*, Python [\w.+]+, .*", "coatcheck 0.1.0, Python 3.11.7, Linux x86_64"),
    (r"disk: .* are free", "disk: 54.2 GB are free"),
    (
        r"(ok  |note)    child processes: .*",
        "ok      child processes: confined to their own files, without sockets and other processes",
    ),
)


def on_terminal(command: str, folder: Path) -> str:
    """Run a command in a folder, on a terminal of its own, and return what it writes there, with
    its colours."""
    environment = {
        "PATH": os.defpath, "HOME": str(folder), "TERM": "xterm-256color", "LANG": "C.UTF-8",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "COATCHECK_STORE": str(folder / ".coatcheck"), "COATCHECK_SESSION": "charged-twice",
    }  # fmt: skip
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    arguments = [sys.executable, "-m", *shlex.split(command)]
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = bytearray()
    try:
        while part := os.read(ours, 65_536):
            written += part
    except OSError:  # Linux reports the end of the other side as an error
        pass
    os.close(ours)
    text = written.decode().replace("\r\n", "\n")
    if process.wait():
        raise SystemExit(f"{command} failed: {text}")
    return text


def draw() -> str:
    """Run all commands and return the terminal as SVG. It needs no fonts from elsewhere."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=COLUMNS,
        force_terminal=True,
        color_system="truecolor",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "checkout.log").write_text(shop.fetch_log("checkout", shop.DAY))
        (folder / "orders.csv").write_text(shop.export_orders(shop.DAY))
        for command in COMMANDS:
            text = on_terminal(command, folder).replace(str(folder), "~/shop")
            for pattern, instead in REPLACED:
                text = re.sub(pattern, instead, text)
            for line in [
                Text.assemble(("$ ", "green"), (command, "bold")),
                *Text.from_ansi(text).split(),
            ]:
                for row in line.divide(range(COLUMNS, len(line), COLUMNS)):
                    console.print(row, no_wrap=True)
    picture = console.export_svg(title="coatcheck", theme=MONOKAI, unique_id="terminal")
    picture = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", picture, flags=re.DOTALL)
    picture = picture.replace(
        "<svg ", '<svg xml:space="preserve" ', 1
    )  # some renderers drop leading spaces
    return re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw())
    print(f"wrote {target}")
    if target == PICTURE:
        from examples.console_pictures import photograph  # here: it needs the packages of the tests

        for one in photograph(DOCS):
            print(f"wrote {one}, {one.stat().st_size:,} bytes")
