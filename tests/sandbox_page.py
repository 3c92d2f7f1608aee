"""The table of attempts in docs/code_rewards.md, made from those that tests/workers/sandbox makes.

`python -m tests.sandbox_page` writes it.
"""

from __future__ import annotations

import pathlib

from tests.workers.sandbox.attempts import CONTROLS, KINDS, LEFT_OPEN

PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'code_rewards.md'
BEGIN, END = '<!-- attempts: python -m tests.sandbox_page -->\n', '<!-- end of attempts -->'


def render_table() -> str:
    head = ('confined code wants to', 'attempts', "`'none'`", "`'landlock'`", "`'bubblewrap'`")
    rows = [head, ('---',) * len(head)]
    for kind, attempts in KINDS.items():
        rows.append((f'{kind} ({len(attempts)})', '; '.join(attempts), 'passes', 'refused', 'refused'))
    for title, names in (('do what both leave open', LEFT_OPEN), ('do what programs need', CONTROLS)):
        rows.append((f'{title} ({len(names)})', '; '.join(names), 'passes', 'passes', 'passes'))
    return ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def replace_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + '\n' + render_table() + '\n' + END + rest.partition(END)[2]


if __name__ == '__main__':
    PAGE.write_text(replace_table(PAGE.read_text()))
