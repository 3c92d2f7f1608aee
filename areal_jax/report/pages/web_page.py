"""One self-contained page of HTML: sections of texts, tables and Bokeh's charts, with its scripts and data inline.

Every text is escaped, and the page forbids the browser any request. It is light or dark as the browser prefers, or as
its button says; the charts have their colours of colors.py replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from areal_jax.installation import describe_install
from areal_jax.report.pages.colors import dark_colors
from areal_jax.report.pages.report_texts import Items, Part, Table, Text

if TYPE_CHECKING:  # Bokeh is an extra, and its import takes a second
    import jinja2
    import markupsafe
    from bokeh.models import UIElement

    from areal_jax.report.pages.markdown_page import Tile, Tone

LIBRARY, EXTRA = 'bokeh', 'plots'
_TEMPLATE = pathlib.Path(__file__).with_name('web_page.html')


@dataclasses.dataclass(frozen=True)
class Key:
    """An entry of a legend; a click on it hides the glyphs that have the name of the key."""

    label: str
    color: str
    look: str = 'box'  # box, solid, dashed, dotted, dotdash, diamond, cross
    name: str = ''  # of glyphs; '' = nothing to hide

    @property
    def dark(self) -> str:
        """The colour on a dark page."""
        return dark_colors().get(self.color.lower(), self.color)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure with its words and its numbers."""

    figure: UIElement
    title: str
    unit: str
    alt: str  # what it shows, for those who do not see it
    table: Table  # its numbers, opened at a click; empty where another table of the page has them
    caption: str = ''
    wide: bool = False  # over two columns of a grid
    keys: Sequence[Key] = ()


@dataclasses.dataclass(frozen=True)
class Grid:
    """Charts beside each other, by name; a single one has the whole width."""

    charts: Mapping[str, Chart]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The headline."""

    tiles: Sequence[Tile]


@dataclasses.dataclass(frozen=True)
class Absent:
    """Why there is nothing to show."""

    text: str


@dataclasses.dataclass(frozen=True)
class Folded:
    """A table that opens at a click."""

    title: str
    table: Table


Block: TypeAlias = Part | Grid | Tiles | Absent | Folded


@dataclasses.dataclass(frozen=True)
class Section:
    name: str  # of the anchor
    title: str
    blocks: Sequence[Block | None]  # None and empty parts are left out


def describe_missing_library(file: str) -> str:
    """The sentence on a page that cannot be made here, '' where the plotting library is installed."""
    if importlib.util.find_spec(LIBRARY) is not None:
        return ''
    return f'{file} needs the package {LIBRARY}, which is not installed: {describe_install(EXTRA)}'


def render_web_page(
    title: str, head: Sequence[Block | None], sections: Sequence[Section], state: tuple[str, Tone] | None = None
) -> str:
    """The page; `head` is above the links to the sections, `state` of the run beside the title."""
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.resources import Resources
    from markupsafe import Markup

    shown = [(section, [block for block in section.blocks if block]) for section in sections]
    figures = _figures([block for _, blocks in shown for block in blocks])
    document = Document()
    with document.models.freeze():  # or each figure is searched again for every other one
        for figure in figures.values():
            document.add_root(figure)
    script, divisions = components(figures) if figures else ('', {})
    assert isinstance(divisions, dict)
    library = Resources(mode='inline', components=['bokeh', 'bokeh-gl']).render_js() if figures else ''
    return _template().render(
        title=title,
        head=[_context(block) for block in head if block],
        sections=[
            {'name': section.name, 'title': section.title, 'blocks': [_context(block) for block in blocks]}
            for section, blocks in shown
        ],
        state=state,
        figures={name: Markup(division) for name, division in divisions.items()},
        colors=dark_colors() if figures else {},
        library=Markup(library),
        script=Markup(script),
    )


def _figures(blocks: Sequence[Block]) -> dict[str, UIElement]:
    grids = (block for block in blocks if isinstance(block, Grid))
    return {name: chart.figure for grid in grids for name, chart in grid.charts.items()}


def _context(block: Block) -> Mapping[str, object]:
    """What the template reads of a block."""
    if isinstance(block, Text):
        return {'kind': 'text', 'text': block.text}
    if isinstance(block, Absent):
        return {'kind': 'absent', 'text': block.text}
    if isinstance(block, Items):
        return {'kind': 'items', 'entries': block.items}
    if isinstance(block, Table):
        return {'kind': 'table', 'head': block.head, 'rows': block.rows}
    if isinstance(block, Folded):
        return {'kind': 'folded', 'title': block.title, 'table': _context(block.table)}
    if isinstance(block, Tiles):
        return {'kind': 'tiles', 'tiles': block.tiles}
    tables = {name: _context(chart.table) for name, chart in block.charts.items() if chart.table}
    return {'kind': 'grid', 'charts': block.charts, 'tables': tables}


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters['code'] = _mark_code
    return environment.from_string(_TEMPLATE.read_text())


def _mark_code(text: str) -> markupsafe.Markup:
    """Escaped; text between backticks is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r'`([^`]+)`', r'<code>\1</code>', str(escape(text))))
