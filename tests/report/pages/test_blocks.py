"""A page of blocks as Markdown."""

from __future__ import annotations

from areal_jax.report.pages.blocks import (
    Absent,
    Chart,
    Folded,
    Grid,
    Items,
    Section,
    Table,
    Text,
    Tile,
    Tiles,
    render_markdown,
    show_pictures,
)


def test_a_page_has_its_sections_and_none_that_is_empty_or_of_the_screen_alone():
    screen = [Absent('Why.', ['one']), Folded('All', Table(('a',), [('b',)])), Grid({'c': Chart(title='t', alt='')})]
    sections = [
        Section('one', 'One', [Text('A `b`.'), *screen, Text(''), Items(['c', 'd'])]),
        Section('two', 'Two', [*screen, Text(''), Items([]), Table(('a', 'b'), [])]),
        show_pictures(['plots/a.png']),
        show_pictures([]),
    ]
    page = render_markdown('Title', [Text('Head.')], sections)
    expected = '# Title\n\nHead.\n\n## One\n\nA `b`.\n\n- c\n- d\n\n## Pictures\n\n![plots/a.png](plots/a.png)\n'
    assert page == expected


def test_tables_and_tiles_have_rows_whose_cells_end_no_column():
    tile = Tile('gain', 'Did it learn?', '0.5', 'accuracy', ('from 0.25',), 'Yes.', 'good', 'learning')
    page = render_markdown('t', [Table(('a|b', ''), [('1 | 2', '3')]), Tiles([tile])], [])
    assert page.splitlines()[2:5] == ['| a/b |  |', '| --- | --- |', '| 1 / 2 | 3 |']
    assert page.splitlines()[-1] == '| Did it learn? | 0.5 accuracy, from 0.25 | Yes. |'
