"""What `make site` has besides the pages of this folder: hooks of mkdocs.

README, SECURITY and CHANGELOG are pages, too, each notebook is one with its outputs, and the
reference is made of the public names' docstrings. Links from page to page are kept; those to source
files become plain text, as the site has none.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import cached_rag

_ROOT = Path(__file__).parent.parent
_PAGES = ("README.md", "SECURITY.md", "CHANGELOG.md")
_LINK = re.compile(r"\[([^\]\[]*)\]\(((?!https?:|#)[^)\s]+)\)")
_GROUPS = {
    "Functions": inspect.isfunction,
    "Errors": lambda one: inspect.isclass(one) and issubclass(one, Exception),
    "Classes": inspect.isclass,
}


def on_config(config: MkDocsConfig) -> None:
    """Put the notebooks into the navigation."""
    for part in config.nav or []:
        if "Notebooks" in part:
            part["Notebooks"] = [f"notebooks/{path.stem}.md" for path in _notebooks()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in this folder."""
    texts = {name: (_ROOT / name).read_text() for name in _PAGES}
    texts |= {f"notebooks/{path.stem}.md": _notebook(path) for path in _notebooks()}
    texts["api.md"] = _reference()
    known = {file.src_uri for file in files} | set(texts)
    for name, text in texts.items():
        files.append(File.generated(config, name, content=_linked(text, name, known)))
    config.extra["known"] = known
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """See that links lead to pages of the site."""
    return _linked(markdown, page.file.src_uri, config.extra["known"])


def _linked(text: str, name: str, known: set[str]) -> str:
    """Links as they have to be on the site; outside of blocks of code."""
    depth = "../" * name.count("/")

    def link(found: re.Match[str]) -> str:
        says, target = found.groups()
        path, hash_, anchor = target.partition("#")
        path = re.sub(r"^(\.\./|\./|docs/)+", "", path).replace(".ipynb", ".md")
        if path in known:
            return f"[{says}]({depth}{path}{hash_}{anchor})"
        is_source = path and any((place / path).exists() for place in (_ROOT, _ROOT / "docs"))
        return str(says) if is_source else found[0]  # which mkdocs reports, if it leads nowhere

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _notebooks() -> list[Path]:
    return sorted((_ROOT / "notebooks").glob("*.ipynb"))


def _notebook(path: Path) -> str:
    """A notebook as Markdown, with the outputs that it was kept with."""
    written: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        written.append(source if cell["cell_type"] == "markdown" else _block("python", source))
        written += map(_output, cell.get("outputs", []))
    return "\n\n".join(written) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="a plot" src="data:image/png;base64,{image}">'
    return _block("text", "".join(output.get("text") or data.get("text/plain", "")))


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```" if text.strip() else ""


def _reference() -> str:
    """All public names, each under the first of the groups that it belongs to."""
    left = {name: getattr(cached_rag, name) for name in cached_rag.__all__}
    written = ["# Reference", "The public names of `cached_rag`, from their docstrings."]
    for title, belongs in _GROUPS.items():
        names = [name for name, one in left.items() if belongs(one)]
        written += [f"## {title}", *(_described(left.pop(name)) for name in names)]
    return "\n\n".join(written) + "\n"


def _described(one: Any) -> str:
    """The block that becomes a name's docstring, with what a base has that is not public itself."""
    block = f"::: {one.__module__}.{one.__qualname__}"
    bases = [base.__name__ for base in getattr(one, "__bases__", ()) if _is_ours(base)]
    if set(bases) <= set(cached_rag.__all__):
        return block
    return f"{block}\n    options:\n      inherited_members: true"


def _is_ours(one: type) -> bool:
    return one.__module__.startswith("cached_rag.")
