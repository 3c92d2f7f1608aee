"""Colours of the pages and pictures, on a white and on a dark page, and which member of a comparison has which."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

# Colours of Okabe and Ito, distinguishable with any kind of colour vision; some are darker, for a white page.
BLUE, VERMILION, GREEN, AMBER, GREY = '#0072B2', '#D55E00', '#008F68', '#AD7A00', '#777777'
PALETTE = (BLUE, VERMILION, GREEN, AMBER, '#B5578F', '#3388BB', GREY, '#000000')
SHADES = ('#440154', '#46327e', '#365c8d', '#277f8e', '#1fa187', '#4ac16d', '#a0da39', '#fde725')  # of viridis
LEVELS = ('#16335B', '#24548C', '#3B7BB8', '#69A5D6', '#B8D4E8', '#F2C94C')  # ascending, the same on both pages
FATES = {
    'trained': GREEN,
    'filtered': '#8A8F98',
    'masked': '#C98A00',
    'unused': '#B5A400',
    'unfinished': '#3388BB',
}
DROPS = ('#D55E00', '#B5578F', '#8C510A', '#7B3294', '#B2182B')  # by reason
INK, TEXT, LINE, GRID = '#1C2026', '#4A525C', '#8A929C', '#E3E6EA'  # of axes and labels
PAGE, DARK_PAGE = '#FFFFFF', '#15181D'
_LIGHTEST, _DARKEST = 0.84, 0.32  # places on viridis still visible on a white and on a dark page
_ON_DARK = {
    BLUE: '#5BB5F0', VERMILION: '#FF9451', GREEN: '#2BCB9B', AMBER: '#F0B429', '#B5578F': '#EE9FCB',
    '#3388BB': '#9AD4F5', GREY: '#A6ADB5', INK: '#E8EBEF', TEXT: '#B9C1CB', LINE: '#6B737D', GRID: '#2B3138',
    '#000000': '#F4F6F8', 'black': '#F4F6F8', 'white': DARK_PAGE, '#8A8F98': '#8A8F98', '#C98A00': '#F0B429',
    '#B5A400': '#E5D84A', '#8C510A': '#C98B4B', '#7B3294': '#B98BD0', '#B2182B': '#F0707C',
}  # fmt: skip

Look = tuple[str, int]  # colour, number of the line's style
DASHES = ('solid', 'dashed', 'dotted', 'dotdash')  # by the number of a line's style


def shade_at(place: float) -> str:
    """The colour of viridis at `place`, from 0 (dark) to 1 (light)."""
    at = min(1.0, max(0.0, place)) * (len(SHADES) - 1)
    low = min(int(at), len(SHADES) - 2)
    mixed = (
        round(first + (at - low) * (second - first))
        for first, second in zip(channels(SHADES[low]), channels(SHADES[low + 1]), strict=True)
    )
    return '#' + ''.join(f'{channel:02x}' for channel in mixed)


def order_shades(count: int) -> list[str]:
    """Colours of `count` values in ascending order, for a white page."""
    return [shade_at(_LIGHTEST * index / max(1, count - 1)) for index in range(count)]


@functools.cache
def dark_colors() -> dict[str, str]:
    """The colour on a dark page for each colour of this module, including `order_shades` of up to 24 values."""
    places = {index / max(1, count - 1) for count in range(1, 25) for index in range(count)}
    ordered = {shade_at(_LIGHTEST * place): shade_at(_DARKEST + (1 - _DARKEST) * place) for place in places}
    return {color.lower(): other for color, other in {**ordered, **_ON_DARK}.items()}


def choose_looks(members: Mapping[str, Mapping[str, object]]) -> tuple[str, dict[str, Look]]:
    """Chooses the look of each member by its config fields: shades in the order of a numeric field that differs.

    Returns (field, looks); ('', palette looks) if no numeric field orders the members. Members with equal values of
    the field share a colour and differ in line style; looks are in the field's order. `run.seed` is never chosen.
    """
    field = _ordering_field(members)
    if not field:
        return '', spread_looks(list(members))
    values = sorted({float(str(fields[field])) for fields in members.values()})
    shades = dict(zip(values, order_shades(len(values)), strict=True))
    styles = {value: itertools.count() for value in values}
    ranks = sorted(((name, float(str(fields[field]))) for name, fields in members.items()), key=lambda rank: rank[1])
    return field, {name: (shades[value], next(styles[value])) for name, value in ranks}


def spread_looks(labels: Sequence[str]) -> dict[str, Look]:
    """Returns the look of each label: the colours of the palette, then the same in another style."""
    return {label: (PALETTE[index % len(PALETTE)], index // len(PALETTE)) for index, label in enumerate(labels)}


def channels(color: str) -> tuple[int, int, int]:
    """Red, green and blue of '#rrggbb'."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _ordering_field(members: Mapping[str, Mapping[str, object]]) -> str:
    """The numeric field with most values, if it has three or more or is the only field that differs; else ''.

    Among equals, the first field that ascends in the order of the members.
    """
    if len(members) < 2:
        return ''
    shared = [name for name in next(iter(members.values())) if all(name in fields for fields in members.values())]
    found = {name: {str(fields[name]) for fields in members.values()} for name in shared if name != 'run.seed'}
    different = {name: values for name, values in found.items() if len(values) > 1}
    ordered = {name: values for name, values in different.items() if all(map(_is_number, values))}
    ascends = {name: _ascends([float(str(fields[name])) for fields in members.values()]) for name in ordered}
    best = max(ordered, key=lambda name: (len(ordered[name]), ascends[name]), default='')
    return best if best and (len(ordered[best]) > 2 or len(different) == 1) else ''


def _ascends(values: Sequence[float]) -> bool:
    return list(values) == sorted(values)


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False
