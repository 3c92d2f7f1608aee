"""docs/commands.md is what the declarations say."""

import pathlib

from areal_jax.commands.page import COMMAND_LINE, render

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'commands.md'


def test_the_page_is_made_from_the_declarations():
    assert PAGE.read_text() == render(), f'run {COMMAND_LINE}'
