"""The table of methods in docs/objectives.md, made from the table of the program.

`python -m tests.objectives_page` writes it.
"""

from __future__ import annotations

import pathlib

from areal_jax.config.objectives import BASE, OBJECTIVES, ObjectiveKind, is_policy

PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'objectives.md'
BEGIN, END = '<!-- methods: python -m tests.objectives_page -->\n', '<!-- end of methods -->'
_COLUMNS = ('ratio', 'ratio_denominator', 'correction', 'surrogate', 'advantage', 'aggregation')


def render_table() -> str:
    head = ('`loss.objective`', 'ratio', 'over', 'correction', 'surrogate', 'advantage', 'aggregation', 'and', 'source')
    rows = [head, ('---',) * len(head)]
    rows += [_row(kind) for kind in OBJECTIVES.values() if is_policy(kind.name)]
    return ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def _row(kind: ObjectiveKind) -> tuple[str, ...]:
    choices = {**BASE, **kind.choices}
    if choices['ratio'] == 'none':
        choices['ratio_denominator'] = 'none'
    shown = ['–' if choices[name] == 'none' else str(choices[name]) for name in _COLUMNS]
    others = [f'{name} {value}' for name, value in kind.choices.items() if name not in _COLUMNS]
    return (f'`{kind.name}`', *shown, ', '.join(others), kind.source)


def replace_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + '\n' + render_table() + '\n' + END + rest.partition(END)[2]


if __name__ == '__main__':
    PAGE.write_text(replace_table(PAGE.read_text()))
