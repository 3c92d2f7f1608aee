"""The blocks of a page (texts, tables, tiles, charts) in sections, and such a page as Markdown.

web_page.py shows the same sections as HTML.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from areal_jax.report.pages.colors import DASHES, INK, LEVELS, dark_colors

Row = TypeVar('Row')
Tone: TypeAlias = Literal['good', 'fair', 'bad', 'unknown']


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph; code is between backticks."""

    text: str

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclasses.dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under `head`; the first cell of a row is its label."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ''  # in a comparison of runs, which leaves out tables without one

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One question with its answer."""

    name: str
    question: str
    value: str  # '-' if nothing was measured
    unit: str
    details: tuple[str, ...]
    reading: str  # one sentence
    tone: Tone
    section: str  # that has the detail

    @property
    def answer(self) -> str:
        """Value, unit and details in one cell."""
        return ', '.join(filter(None, (f'{self.value} {self.unit}'.strip(), *self.details)))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The headline."""

    tiles: Sequence[Tile]


@dataclasses.dataclass(frozen=True)
class Line:
    """Points of one look, joined by a line."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    style: int = 0  # number of the line's style
    marker: str = ''  # circle, square, triangle, diamond; '' = the line is what counts
    lows: Sequence[float] = ()  # with highs: the interval of each point
    highs: Sequence[float] = ()
    details: Mapping[str, Sequence[object]] = dataclasses.field(default_factory=dict)  # of the points, by name


@dataclasses.dataclass(frozen=True)
class Bars:
    """Bars of one look, from `starts` to `ends`."""

    label: str
    color: str
    places: Sequence[float]  # of their middles
    starts: Sequence[float]
    ends: Sequence[float]
    width: float = 0.9
    texts: Sequence[str] = ()  # behind their ends
    details: Mapping[str, Sequence[object]] = dataclasses.field(default_factory=dict)  # of the bars, by name


@dataclasses.dataclass(frozen=True)
class Cells:
    """A picture of cells: row i at the place i, the columns evenly from `left` to `right`."""

    label: str
    values: np.ndarray  # float [rows, columns]; nan = a cell that stays empty
    left: float
    right: float
    bounds: Sequence[float]  # between the levels, ascending
    levels: Sequence[str]  # labels, one more than bounds; colors.LEVELS has their colours
    none: str  # label of a value of 0
    none_color: str

    @property
    def level_of(self) -> np.ndarray:
        """The level of each cell from 0, float32 [rows, columns]; nan for a value of 0, and -1 for an empty cell."""
        found = np.searchsorted(self.bounds, self.values, side='right').astype(np.float32)
        found[np.isnan(self.values)] = -1
        found[self.values == 0] = np.nan
        return found

    @property
    def keys(self) -> list[Key]:
        """Its entries of the legend."""
        levels = [Key(label, color) for label, color in zip(self.levels, LEVELS, strict=True)]
        return [Key(self.none, self.none_color), *levels]


@dataclasses.dataclass(frozen=True)
class Key:
    """An entry of a legend; a click on it hides the glyphs that have the name of the key."""

    label: str
    color: str
    look: str = 'box'  # box, solid, dashed, dotted, dotdash, diamond, cross
    name: str = ''  # the glyphs' name; '' = nothing to hide

    @property
    def dark(self) -> str:
        """The colour on a dark page."""
        return dark_colors().get(self.color.lower(), self.color)


UPDATE = 'update'  # label of an axis: charts of a grid that have it zoom and pan together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure, declared once for the page and for a picture, with its words and its numbers."""

    title: str
    unit: str = ''  # of the values
    x: str = ''  # label of the other axis
    marks: Sequence[Line | Bars | Cells] = ()
    alt: str  # the content in words, for screen readers
    table: Table = Table((), ())  # its numbers, opened at a click; empty if another table of the page has them
    caption: str = ''
    hover: Sequence[tuple[str, str]] = ()  # label and '@column{format}' with the columns x, y, low, high and details
    wide: bool = False  # over two columns of a grid
    legend: bool = True
    stacked: bool = False  # bars lie on each other, so that none can be hidden
    horizontal: bool = False
    names: Sequence[str] = ()  # of the places 0, 1, ...; without them places are numbers
    percent: bool = False
    logarithmic: bool = False
    window: int = 1  # updates of the moving mean over a faint line
    band: float = 0.0  # opacity of the area between the ends of intervals; 0 = intervals are bars
    bound: tuple[str, float] | None = None  # label and place of a dashed line

    @property
    def keys(self) -> list[Key]:
        """The legend."""
        lines = [mark for mark in self.marks if not isinstance(mark, Cells)]
        shown = [mark for mark in lines if mark.label and (mark.xs if isinstance(mark, Line) else mark.places)]
        keys = [self._key(mark) for mark in shown if self.legend]
        keys += [key for mark in self.marks if isinstance(mark, Cells) for key in mark.keys]
        return [*keys, Key(self.bound[0], INK, 'dashed')] if self.bound else keys

    def _key(self, mark: Line | Bars) -> Key:
        look = DASHES[mark.style % len(DASHES)] if isinstance(mark, Line) else 'box'
        return Key(mark.label, mark.color, look, '' if self.stacked else self.name_glyphs(mark))

    def name_glyphs(self, mark: Line | Bars | Cells) -> str:
        """Returns the name of the mark's glyphs."""
        return f'{self.title}/{mark.label}'


@dataclasses.dataclass(frozen=True)
class Grid:
    """Charts side by side, by name; a single chart has the whole width."""

    charts: Mapping[str, Chart]


@dataclasses.dataclass(frozen=True)
class Absent:
    """The reason why there is nothing to show, or the list of what is not shown."""

    text: str
    items: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Folded:
    """A table that opens at a click."""

    title: str
    table: Table


@dataclasses.dataclass(frozen=True)
class TokenView:
    """Answers whose tokens are coloured; token_page.py makes the view, token_view.html draws it."""

    view: Mapping[str, object]

    @property
    def json(self) -> str:
        """The view, without a character that could end the script around it."""
        return json.dumps(self.view, separators=(',', ':'), allow_nan=False).replace('<', '\\u003c')


Block: TypeAlias = Text | Items | Table | Tiles | Grid | Absent | Folded | TokenView


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks under a title; empty ones are left out."""

    name: str  # of the anchor
    title: str
    blocks: Sequence[Block]


def tabulate(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]], title: str = '') -> Table:
    """Returns a table with a line for each row; `columns` gives a cell of a row by its head."""
    return Table(tuple(columns), [tuple(cell(row) for cell in columns.values()) for row in rows], title)


def show_pictures(paths: Sequence[str]) -> Section:
    """Returns the section of a page of Markdown that shows these pictures; paths are relative to the page."""
    return Section('pictures', 'Pictures', [Text(f'![{path}]({path})') for path in paths])


def render_markdown(title: str, head: Sequence[Block], sections: Sequence[Section]) -> str:
    """Returns the page without charts, folded tables and `Absent`; a section with nothing else is left out."""
    parts = [f'# {title}', *map(_render, head)]
    for section in sections:
        shown = [text for block in section.blocks if (text := _render(block))]
        parts += [f'## {section.title}', *shown] if shown else []
    return '\n\n'.join(filter(None, parts)) + '\n'


def _render(block: Block) -> str:
    """Returns the block as Markdown; '' for an empty block and for one of the screen alone."""
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Items):
        return '\n'.join(f'- {item}' for item in block.items)
    if isinstance(block, Tiles):
        rows = [(tile.question, tile.answer, tile.reading) for tile in block.tiles]
        return _render(Table(('question', 'answer', 'reading'), rows))
    if isinstance(block, Table) and block:
        lines = [block.head, ['---'] * len(block.head), *block.rows]
        return '\n'.join(f'| {" | ".join(cell.replace("|", "/") for cell in line)} |' for line in lines)
    return ''
