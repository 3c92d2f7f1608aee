"""Colours that are seen on a white and on a dark page, and an order that shows."""

from __future__ import annotations

import pytest

from areal_jax.report.pages.colors import (
    DARK_PAGE,
    DROPS,
    FATES,
    INK,
    PAGE,
    PALETTE,
    SHADES,
    TEXT,
    channels,
    choose_looks,
    dark_colors,
    order_shades,
    shade_at,
)


def luminance(color: str) -> float:
    """Of WCAG 2."""
    parts = [channel / 255 for channel in channels(color)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast('#000000', '#ffffff') == pytest.approx(21)
    assert contrast('#777777', '#ffffff') == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize(('colors', 'least'), [(PALETTE, 3), ((*FATES.values(), *DROPS), 2.4), ((INK, TEXT), 4.5)])
def test_colors_stand_out_from_the_page_in_both_themes(colors: tuple[str, ...], least: float):
    dark = dark_colors()
    assert [color for color in colors if contrast(color, PAGE) < least] == []
    assert [color for color in colors if contrast(dark[color.lower()], DARK_PAGE) < least] == []


def test_shades_of_an_order_get_lighter_one_by_one():
    assert (shade_at(0), shade_at(1)) == (SHADES[0], SHADES[-1])
    for count in (2, 8, 24):
        shades = order_shades(count)
        on_dark = [dark_colors()[shade] for shade in shades]
        for of in (shades, on_dark):
            assert sorted(of, key=luminance) == of
            assert len(set(of)) == count
        assert min(contrast(shade, DARK_PAGE) for shade in on_dark) > 2


def test_runs_that_differ_in_a_number_have_shades_in_its_order():
    members = {
        name: {'eta': eta, 'run.seed': seed} for seed, (name, eta) in enumerate({'b': 4.0, 'c': 16.0, 'a': 0.0}.items())
    }
    field, looks = choose_looks(members)
    assert field == 'eta'
    assert list(looks) == ['a', 'b', 'c']
    assert [color for color, _ in looks.values()] == order_shades(3)


def test_an_infinite_value_comes_last_and_equal_values_differ_in_style():
    members = {
        f'eta{eta}_{method}': {'eta': eta, 'loss': method}
        for eta in ('0.0', 'inf', '4.0')
        for method in ('plain', 'decoupled')
    }
    field, looks = choose_looks(members)
    assert field == 'eta'
    shades = order_shades(3)
    assert looks['eta0.0_plain'] == (shades[0], 0)
    assert looks['eta0.0_decoupled'] == (shades[0], 1)
    assert looks['etainf_plain'] == (shades[2], 0)


def test_of_two_numbers_that_change_together_the_one_that_ascends_orders():
    members = {str(size): {'groups': 64 // size, 'size': size} for size in (4, 8, 16)}
    assert choose_looks(members)[0] == 'size'


@pytest.mark.parametrize(
    'fields',
    [
        [{'loss': 'plain'}, {'loss': 'decoupled'}],
        [{'run.seed': 0}, {'run.seed': 1}],
        [{'loss': 'plain', 'lag': 0}, {'loss': 'decoupled', 'lag': 4}],
        [{'lag': 4}],
    ],
)
def test_without_an_order_the_palette_is_used(fields: list[dict[str, object]]):
    field, looks = choose_looks({str(index): of for index, of in enumerate(fields)})
    assert field == ''
    assert [color for color, _ in looks.values()] == list(PALETTE[: len(fields)])
