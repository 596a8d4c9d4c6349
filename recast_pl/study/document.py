"""A document of plain blocks, as Markdown with files and as one HTML page that needs no other file."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A heading of level 1 to 3."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Lines as they are."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; a cell's lines stand under each other."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A PNG file in the document's folder."""

    file: str
    caption: str


Block = Heading | Paragraph | Code | Table | Picture

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #d0d0d0; padding: .35rem .7rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #707070; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; }
figcaption { font-size: 13px; color: #444; max-width: 60rem; }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; font-size: 12px; }
.table { overflow-x: auto; }
"""


def markdown(blocks: Sequence[Block]) -> str:
    """The document as Markdown; pictures by their file names."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_plain(block.text)}"
        case Paragraph():
            return _plain(block.text)
        case Code():
            return "\n".join("    " + line for line in block.text.splitlines())
        case Table():
            rows = [block.head, ("---",) * len(block.head), *block.rows]
            return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)
        case Picture():
            return f"![{_plain(block.caption)}]({block.file})\n\n{_plain(block.caption)}"


def _plain(text: str) -> str:
    """Text that Markdown takes as it is: names may hold what it would take for its own."""
    for sign in ("\\", "*", "_", "<", "[", "]"):
        text = text.replace(sign, f"\\{sign}")
    return text


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", "<br>") if text != "---" else text


def page(blocks: Sequence[Block], folder: Path, *, title: str) -> str:
    """The document as one HTML page.

    Args:
        blocks: of the document.
        folder: where its pictures are.
        title: of the page.
    """
    body = "\n".join(_html(block, folder) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block, folder: Path) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
        case Paragraph():
            return f"<p>{html.escape(block.text)}</p>"
        case Code():
            return f"<pre>{html.escape(block.text)}</pre>"
        case Table():
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.head)
            rows = "\n".join(
                "<tr>" + "".join(f"<td>{_lines(cell)}</td>" for cell in row) + "</tr>" for row in block.rows
            )
            return (
                f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
                f"<tbody>\n{rows}\n</tbody>\n</table></div>"
            )
        case Picture():
            data = base64.b64encode((folder / block.file).read_bytes()).decode()
            caption = html.escape(block.caption)
            return (
                f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )


def _lines(cell: str) -> str:
    return html.escape(cell).replace("\n", "<br>")
