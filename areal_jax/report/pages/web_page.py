"""One self-contained page of HTML: sections of texts, tables and Bokeh's charts, with scripts and data inline.

Every text is escaped, and the page forbids the browser any request. It is light or dark as the browser prefers or as
its button is set; the colours of the charts change with it.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.installation import describe_install
from areal_jax.report.pages.blocks import Block, Grid, Section, TokenView, Tone
from areal_jax.report.pages.colors import dark_colors
from areal_jax.report.pages.figures import draw_chart, new_updates
from areal_jax.report.pages.slot_figure import draw_slots
from areal_jax.report.pages.slot_timeline import SlotChart

if TYPE_CHECKING:
    import jinja2
    import markupsafe
    from bokeh.models import UIElement

LIBRARY, EXTRA = 'bokeh', 'plots'
_TEMPLATE = pathlib.Path(__file__).with_name('web_page.html')  # includes others of its folder


def describe_missing_library(file: str) -> str:
    """The sentence on a page that cannot be made here; '' if the plotting library is installed."""
    if importlib.util.find_spec(LIBRARY) is not None:
        return ''
    return f'{file} needs the package {LIBRARY}, which is not installed: {describe_install(EXTRA)}'


def render_web_page(
    title: str, head: Sequence[Block], sections: Sequence[Section], state: tuple[str, Tone] | None = None
) -> str:
    """The page as HTML; `head` goes above the links to the sections, the run's `state` next to the title."""
    from markupsafe import Markup

    blocks = [block for section in sections for block in section.blocks]
    grids = [block for block in blocks if isinstance(block, Grid)]
    library, script, divisions = _embed(grids) if grids else ('', '', {})
    return _template().render(
        title=title,
        head=head,
        sections=sections,
        state=state,
        figures={name: Markup(division) for name, division in divisions.items()},
        colors=dark_colors() if divisions else {},
        library=Markup(library),
        script=Markup(script),
        has_tokens=any(isinstance(block, TokenView) for block in blocks),
    )


def _embed(grids: Sequence[Grid]) -> tuple[str, str, dict[str, str]]:
    """Returns (Bokeh itself, the script that draws, the element of each figure) as HTML."""
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.resources import Resources

    figures = {name: figure for grid in grids for name, figure in _draw(grid).items()}
    document = Document()
    with document.models.freeze():  # else Bokeh searches every figure again for each other one
        for figure in figures.values():
            document.add_root(figure)
    script, divisions = components(figures)
    assert isinstance(divisions, dict)
    return Resources(mode='inline', components=['bokeh', 'bokeh-gl']).render_js(), script, divisions


def _draw(grid: Grid) -> dict[str, UIElement]:
    updates = new_updates()
    return {
        name: draw_slots(chart.timeline) if isinstance(chart, SlotChart) else draw_chart(chart, updates)
        for name, chart in grid.charts.items()
    }


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    loader = jinja2.FileSystemLoader(_TEMPLATE.parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters['code'] = _mark_code
    return environment.get_template(_TEMPLATE.name)


def _mark_code(text: str) -> markupsafe.Markup:
    """Escapes the text, marks text between backticks as code, and [FILE](FILE) as a link to a file in the folder."""
    from markupsafe import Markup, escape

    linked = re.sub(r'\[([\w.-]+)\]\(\1\)', r'<a href="\1">\1</a>', str(escape(text)))
    return Markup(re.sub(r'`([^`]+)`', r'<code>\1</code>', linked))
