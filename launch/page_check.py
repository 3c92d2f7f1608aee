"""Looks at pages of areal-report and areal-rollouts in a headless Chromium without network; for launch/test_page.sh.

Says what was checked, one line a page; exit code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

SECTIONS = {
    'report': [
        'headline', 'warnings', 'learning', 'answers', 'speed', 'slots', 'staleness', 'agreement', 'optimisation',
        'ledger', 'censoring', 'groups', 'config',
    ],
    'compare': ['headline', 'warnings', 'config', 'curves', 'ages', 'ledger', 'numbers'],
}  # fmt: skip
WIDTHS = (390, 768, 1440)  # pixels of a phone, a tablet and a screen
# a browser of root in a container; no GPU: WebGL is computed
_ARGUMENTS = ('--no-sandbox', '--use-angle=swiftshader', '--enable-unsafe-swiftshader')
_IDLE = 'window.Bokeh ? Bokeh.documents.every(document => document.is_idle) : true'
_VIEW = "() => { const range = Bokeh.documents[0].get_model_by_name('slots').x_range; return [range.start, range.end] }"
_PAINTED = '() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))'
_DEADLINE_S, _ZOOMS, _MOST_S = 60.0, 8, 1.0  # of a page, steps of the wheel, median seconds of one
_COLORS = 8  # at least, in a figure with data


@dataclasses.dataclass
class Findings:
    """Of one page."""

    failures: list[str] = dataclasses.field(default_factory=list)
    facts: list[str] = dataclasses.field(default_factory=list)

    def require(self, holds: bool, failure: str) -> None:
        if not holds:
            self.failures.append(failure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every page; returns the exit status."""
    parser = argparse.ArgumentParser(prog='launch.page_check', description=__doc__)
    parser.add_argument('pages', nargs='+', type=pathlib.Path)
    parser.add_argument('--chromium', required=True, help='path of the browser')
    parser.add_argument('--pictures', required=True, type=pathlib.Path, help='folder for pictures of the pages')
    options = parser.parse_args(arguments)
    from playwright.sync_api import sync_playwright

    failed = False
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=options.chromium, args=_ARGUMENTS)
        for index, path in enumerate(options.pages):
            found = check_page(browser, path.resolve(), options.pictures / f'{index}_{path.stem}')
            failed = failed or bool(found.failures)
            print(f'{path}: {"; ".join(found.facts)}')
            for failure in found.failures:
                print(f'{path}: FAILED: {failure}')
        browser.close()
    print(f'pictures in {options.pictures}')
    return int(failed)


def check_page(browser: Browser, path: pathlib.Path, picture: pathlib.Path) -> Findings:
    """Opens it, checks it and leaves PICTURE.png, and PICTURE_zoomed.png of the timeline."""
    found = Findings()
    context = browser.new_context(viewport={'width': 1280, 'height': 900}, offline=True)
    page = context.new_page()
    page.set_default_timeout(1000 * _DEADLINE_S)
    page.on('console', lambda m: found.require(m.type not in ('error', 'warning'), f'the console has: {m.text[:300]}'))
    page.on('pageerror', lambda error: found.failures.append(f'a script raised: {str(error)[:300]}'))
    page.on('request', lambda r: found.require(_is_own(r.url, path), f'it requested {r.url[:200]}'))
    began = time.monotonic()
    page.goto(path.as_uri())
    _wait_until_idle(page, found)
    found.facts.append(f'drawn in {time.monotonic() - began:.1f} s')
    if page.locator('#tokens').count():
        _check_tokens(page, found)
    else:
        _check_sections(page, SECTIONS['compare' if page.locator('#numbers').count() else 'report'], found)
        _check_headline(page, found)
        _check_figures(page, found)
    _check_widths(page, picture, found)
    _check_themes(page, picture, found)
    page.evaluate('window.scrollTo(0, 0)')
    page.screenshot(path=f'{picture}.png', full_page=True)
    timeline = page.locator('[data-figure=slots]')
    if timeline.count():
        _check_timeline(page, timeline, picture, found)
    context.close()
    return found


def _is_own(url: str, path: pathlib.Path) -> bool:
    return url.split('#')[0] == path.as_uri() or url.startswith(('data:', 'blob:'))


def _wait_until_idle(page: Page, found: Findings) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not page.evaluate(_IDLE):
        if time.monotonic() > deadline:
            found.failures.append(f'it was not drawn within {_DEADLINE_S:g} s')
            return
        time.sleep(0.05)
    page.evaluate(_PAINTED)


def _check_sections(page: Page, names: Sequence[str], found: Findings) -> None:
    for name in names:
        section = page.locator(f'section#{name}')
        found.require(section.count() == 1, f'it has {section.count()} sections {name}')
        if section.count() == 1:
            says = len(section.inner_text().split()) > 3 or section.locator('[data-figure]').count() > 0
            found.require(says, f'the section {name} is empty')
    found.facts.append(f'{len(names)} sections')


def _check_figures(page: Page, found: Findings) -> None:
    """Each has something drawn in it."""
    figures = page.locator('[data-figure]')
    for index in range(figures.count()):
        figure = figures.nth(index)
        colors = len(_colors(figure))
        found.require(colors >= _COLORS, f'the figure {figure.get_attribute("data-figure")} has {colors} colours only')
    found.facts.append(f'{figures.count()} figures')


def _check_headline(page: Page, found: Findings) -> None:
    """A tile has its number, or the comparison its row, before anything is scrolled."""
    headline = page.locator('section#headline')
    tiles = headline.locator('.tile')
    says = len(headline.inner_text().split())
    found.require(tiles.count() > 0 or says > 20, f'the headline has {tiles.count()} tiles and {says} words')
    for index in range(tiles.count()):
        name, value = tiles.nth(index).get_attribute('data-tile'), tiles.nth(index).locator('.value').inner_text()
        found.require(bool(value.strip()), f'the tile {name} has no value')
    found.facts.append(f'{tiles.count()} tiles')


# whether the elements of each answer's tokens are its text, each with the characters of its token
_TEXTS = """() => JSON.parse(document.getElementById('view').textContent).groups.every(group => {
  const drawn = document.querySelectorAll(`.group[data-draw="${group.draw}"] .answer > .tokens`)
  return group.answers.every((answer, index) => {
    const pieces = Array.from(drawn[index]?.querySelectorAll('.t') ?? [], token => Array.from(token.textContent).length)
    return drawn[index]?.textContent === answer.text && String(pieces) === String(answer.characters ?? [])
  })
})"""
# tokens with a colour, tokens marked as without a number, and whether each has the colour that its value has
_SHADES = """name => {
  const view = JSON.parse(document.getElementById('view').textContent)
  const quantity = view.quantities.find(one => one.name === name)
  let colored = 0, bare = 0, wrong = 0
  for (const token of document.querySelectorAll('.answer .t:not(.asked)')) {
    const {answer, index} = token.of, values = answer.numbers?.[name] ?? null
    const value = values === null ? null : typeof values === 'number' ? values : values[index]
    const has = value !== null && value !== ' ' && value !== 'o'
    const channels = token.style.backgroundColor.match(/\\d+/g)?.slice(0, 3)
    const color = channels?.map(channel => Number(channel).toString(16).padStart(2, '0'))
    if (color) colored += 1
    if (token.classList.contains('bare')) bare += 1
    if (answer.given?.[index] === '1' ? color : has === token.classList.contains('bare') || (color && !has)) wrong += 1
    const expected = has && quantity.colors?.[value]
    if (expected && `#${color?.join('')}` !== expected.toLowerCase()) wrong += 1
  }
  return [colored, bare, wrong]
}"""


def _check_tokens(page: Page, found: Findings) -> None:
    """Every token is there and has the colour of its value, for each quantity; its numbers appear at the pointer."""
    for index in range(page.locator('.group').count()):
        group = page.locator('.group').nth(index)
        if group.get_attribute('open') is None:
            group.locator('summary').click()
    page.evaluate(_PAINTED)
    found.require(page.evaluate(_TEXTS), 'the tokens of an answer are not its text')
    tokens = page.locator('.answer .t').count()
    for button in page.locator('[data-quantity]').all():
        button.click()
        name = button.get_attribute('data-quantity')
        colored, _, wrong = page.evaluate(_SHADES, name)
        found.require(colored > 0 or name == 'clip', f'no token has a colour for {name}')  # nothing may be clipped
        found.require(wrong == 0, f'{wrong} of {tokens} tokens have another colour than their {name}')
        found.require(page.locator('#legend > span').count() > 0, f'{name} has no legend')
    if tokens:
        page.locator('.answer .t').first.hover()
        told = page.locator('#token').all_inner_texts()
        found.require('behavior log-prob' in ''.join(told), 'a token does not tell its numbers')
    found.facts.append(f'{tokens} tokens, {page.locator("[data-quantity]").count()} quantities')


def _check_widths(page: Page, picture: pathlib.Path, found: Findings) -> None:
    """Nothing is wider than the page, on a phone as on a screen."""
    usual = page.viewport_size
    for width in WIDTHS:
        page.set_viewport_size({'width': width, 'height': 844})
        _wait_until_idle(page, found)
        wide = page.evaluate('document.documentElement.scrollWidth')
        found.require(wide <= width, f'at a width of {width} px it is {wide} px wide')
        page.evaluate('window.scrollTo(0, 0)')
        page.screenshot(path=f'{picture}_{width}.png')
    if usual:
        page.set_viewport_size(usual)
    _wait_until_idle(page, found)


def _check_themes(page: Page, picture: pathlib.Path, found: Findings) -> None:
    """The browser's preference and the button both turn the page and its charts dark and light again."""
    light = _mean_brightness(page)
    page.emulate_media(color_scheme='dark')
    _wait_until_idle(page, found)
    dark = _mean_brightness(page)
    found.require(light > 0.7 > 0.3 > dark, f'its brightness is {light:.2f} in light and {dark:.2f} in dark')
    if page.locator('[data-figure]').count():
        charts = page.evaluate('document.documentElement.dataset.charts')
        found.require(charts == 'dark', f'on a dark page its charts are {charts}')
    page.screenshot(path=f'{picture}_dark.png', full_page=True)
    page.locator('#theme').click()
    _wait_until_idle(page, found)
    again = _mean_brightness(page)
    found.require(again > 0.7, f'after the button its brightness is {again:.2f}')
    page.evaluate("localStorage.removeItem('areal_jax_theme')")
    page.emulate_media(color_scheme='light')
    found.facts.append('light and dark')


def _mean_brightness(page: Page) -> float:
    from PIL import Image, ImageStat

    return ImageStat.Stat(Image.open(io.BytesIO(page.screenshot())).convert('L')).mean[0] / 255


def _check_timeline(page: Page, timeline: Locator, picture: pathlib.Path, found: Findings) -> None:
    """The wheel zooms in and out, dragging pans, and the picture follows."""
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    assert box
    middle = box['x'] + box['width'] / 2, box['y'] + box['height'] * 0.6
    page.mouse.move(*middle)
    first, before = page.evaluate(_VIEW), timeline.screenshot()
    seconds = [_turn_wheel(page, -240) for _ in range(_ZOOMS)]
    zoomed = page.evaluate(_VIEW)
    found.require(_width(zoomed) < 0.7 * _width(first), f'the wheel did not zoom in: {first} became {zoomed}')
    _wait_until_idle(page, found)
    found.require(timeline.screenshot(path=f'{picture}_zoomed.png') != before, 'the zoom did not change the picture')
    page.mouse.down()
    page.mouse.move(middle[0] - 200, middle[1], steps=5)
    page.mouse.up()
    page.evaluate(_PAINTED)
    panned = page.evaluate(_VIEW)
    found.require(panned[0] > zoomed[0], f'dragging to the left did not pan: {zoomed} became {panned}')
    seconds += [_turn_wheel(page, 240) for _ in range(6 * _ZOOMS)]
    widest = page.evaluate(_VIEW)
    found.require(_width(widest) >= _width(first), f'the wheel did not zoom out: {panned} became {widest}')
    _wait_until_idle(page, found)
    timeline.screenshot(path=f'{picture}_widest.png')
    middle_s, longest = statistics.median(seconds), max(seconds)
    found.require(middle_s <= _MOST_S, f'a step of the wheel took {middle_s:.2f} s, more than {_MOST_S:g} s')
    found.facts.append(f'{len(seconds)} steps of the wheel, median {middle_s:.2f} s, longest {longest:.2f} s')


def _turn_wheel(page: Page, delta: float) -> float:
    """Seconds until the figure is painted again."""
    began = time.monotonic()
    page.mouse.wheel(0, delta)
    page.evaluate(_PAINTED)
    return time.monotonic() - began


def _width(view: Sequence[float]) -> float:
    return view[1] - view[0]


def _colors(figure: Locator) -> set[object]:
    from PIL import Image

    figure.scroll_into_view_if_needed()
    image = Image.open(io.BytesIO(figure.screenshot())).convert('RGB')
    return {color for _, color in image.getcolors(maxcolors=1 << 24) or ()}


if __name__ == '__main__':
    sys.exit(main())
