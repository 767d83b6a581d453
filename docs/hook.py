"""A hook of mkdocs: files outside docs/ that the pages link to become part of the site, under their
path here.

Pages link to them as they are in the repository: `../examples/openai_agent.py`, and in SECURITY.md
`docs/http.md`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
BENCHMARKS = "benchmarks/README.md"
PLOTS = "benchmarks/plots"
_UP, _DOWN = re.compile(r"(?<=\]\()\.\./"), re.compile(r"(?<=\]\()(\.\./)?docs/")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    linked = {
        path
        for page in Path(config.docs_dir).glob("*.md")
        for path in re.findall(r"\]\(\.\./([^)#]+)", page.read_text(encoding="utf-8"))
    }
    plots = {f"{PLOTS}/{plot.name}" for plot in (ROOT / PLOTS).glob("*.svg")}
    for path in sorted(linked | plots | {*TOP, BENCHMARKS}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == BENCHMARKS:
        return _DOWN.sub("../", markdown)
    return (_DOWN if page.file.src_uri in TOP else _UP).sub("", markdown)
