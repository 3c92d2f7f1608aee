"""Conditions and results in words and in Python: the parts from which the families of functions are composed."""

from __future__ import annotations

from collections.abc import Iterator

Part = tuple[str, str]  # in words, in Python
_WORD_LETTERS = 'abest'


def conditions(name: str) -> list[Part]:
    """Conditions on an integer, after 'that is'; no two are equal on all integers."""
    bounds = [
        *(('greater than', '>', k) for k in (1, 3, 5, 7, 9)),
        *(('at least', '>=', k) for k in (3, 5, 7, 9)),
        *(('less than', '<', k) for k in (1, 3, 5, 7, 9)),
        *(('at most', '<=', k) for k in (3, 5, 7, 9)),
        *(('different from', '!=', k) for k in (2, 4, 6, 8)),
    ]
    return [
        *((f'{words} {k}', f'{name} {sign} {k}') for words, sign, k in bounds),
        ('positive', f'{name} > 0'),
        ('negative', f'{name} < 0'),
        ('even', f'{name} % 2 == 0'),
        ('odd', f'{name} % 2 == 1'),
        *((f'divisible by {k}', f'{name} % {k} == 0') for k in (3, 4, 5, 6, 7)),
        *((f'not divisible by {k}', f'{name} % {k} != 0') for k in (3, 4, 5)),
        *((f'between {a} and {b}', f'{a} <= {name} <= {b}') for a, b in ((2, 6), (4, 9), (0, 5), (1, 8), (5, 12))),
    ]


def values(name: str) -> list[Part]:
    """Values that are computed from one integer; no two are equal on all integers."""
    return [
        (f'the square of {name}', f'{name} * {name}'),
        (f'the cube of {name}', f'{name} ** 3'),
        (f'the absolute value of {name}', f'abs({name})'),
        *((f'{name} plus {k}', f'{name} + {k}') for k in range(2, 10)),
        *((f'{name} minus {k}', f'{name} - {k}') for k in range(2, 10)),
        *((f'{k} minus {name}', f'{k} - {name}') for k in (3, 5, 8, 10)),
        *((f'{k} times {name}', f'{name} * {k}') for k in range(2, 10)),
        *((f'{k} times {name} plus {j}', f'{name} * {k} + {j}') for k in (2, 3, 4) for j in (1, 5)),
        *((f'the remainder of {name} divided by {k}', f'{name} % {k}') for k in range(3, 8)),
        *((f'{name} divided by {k} and rounded down', f'{name} // {k}') for k in range(2, 6)),
    ]


def pair_values() -> list[Part]:
    """Values that are computed from two integers a and b; no two are equal on all integers."""
    return [
        ('a plus b', 'a + b'),
        ('a minus b', 'a - b'),
        ('b minus a', 'b - a'),
        ('a times b', 'a * b'),
        ('the larger of a and b', 'max(a, b)'),
        ('the smaller of a and b', 'min(a, b)'),
        ('the absolute difference of a and b', 'abs(a - b)'),
        *((f'{k} times a plus b', f'{k} * a + b') for k in range(2, 7)),
        *((f'a plus {k} times b', f'a + {k} * b') for k in range(2, 7)),
        *((f'a times b plus {k}', f'a * b + {k}') for k in range(1, 6)),
        *((f'the remainder of a plus b divided by {k}', f'(a + b) % {k}') for k in range(3, 8)),
        *((f'a minus {k} times b', f'a - {k} * b') for k in range(2, 5)),
    ]


def character_conditions() -> list[Part]:
    """Conditions on a character c, after 'that is'."""
    return [
        *((f'equal to {letter!r}', f'c == {letter!r}') for letter in 'aeiost'),
        *((f'different from {letter!r}', f'c != {letter!r}') for letter in 'aest'),
        *((f'one of {letters!r}', f'c in {letters!r}') for letters in ('aeiou', 'abc', 'est', 'xyz', 'mn', 'ABE')),
        *((f'none of {letters!r}', f'c not in {letters!r}') for letters in ('aeiou', 'abc', 'est', 'xyz', 'mn')),
        ('a digit', 'c.isdigit()'),
        ('no digit', 'not c.isdigit()'),
        ('a letter', 'c.isalpha()'),
        ('no letter', 'not c.isalpha()'),
        ('an upper case letter', 'c.isupper()'),
        ('a lower case letter', 'c.islower()'),
        ('no upper case letter', 'not c.isupper()'),
        ('no lower case letter', 'not c.islower()'),
        ('a space', "c == ' '"),
        ('no space', "c != ' '"),
        *((f'greater than {letter!r}', f'c > {letter!r}') for letter in 'bgq'),
    ]


def word_conditions() -> list[Part]:
    """Conditions on a word w, after 'words that'."""
    return [
        *((f'have more than {k} letters', f'len(w) > {k}') for k in range(2, 6)),
        *((f'have fewer than {k} letters', f'len(w) < {k}') for k in range(3, 7)),
        *((f'have exactly {k} letters', f'len(w) == {k}') for k in range(2, 6)),
        *((f'begin with {letter!r}', f'w.startswith({letter!r})') for letter in _WORD_LETTERS),
        *((f'end with {letter!r}', f'w.endswith({letter!r})') for letter in 'etar'),
        *((f'contain {letter!r}', f'{letter!r} in w') for letter in 'aeost'),
        *((f'do not contain {letter!r}', f'{letter!r} not in w') for letter in 'aeost'),
    ]


def word_values() -> list[Part]:
    """Texts that are made of a word w, which is not empty."""
    return [
        ('w in upper case', 'w.upper()'),
        ('w reversed', 'w[::-1]'),
        ('the first letter of w', 'w[0]'),
        ('the last letter of w', 'w[-1]'),
        ('w without its first letter', 'w[1:]'),
        ('w without its last letter', 'w[:-1]'),
        ('w with a capital first letter', 'w.capitalize()'),
        *((f'the first {k} letters of w', f'w[:{k}]') for k in (2, 3)),
        *((f'w repeated {k} times', f'w * {k}') for k in (2, 3)),
        *((f'w followed by {mark!r}', f'w + {mark!r}') for mark in '!?s'),
    ]


def rearrangements() -> Iterator[Part]:
    """Lists made of the elements of xs by position."""
    for k in range(1, 5):
        yield f'xs with its first {k} elements moved to the end', f'xs[{k}:] + xs[:{k}]'
        yield f'xs with its last {k} elements moved to the front', f'xs[-{k}:] + xs[:-{k}]'
        yield f'xs without its first {k} elements', f'xs[{k}:]'
        yield f'xs without its last {k} elements', f'xs[:-{k}]'
        yield f'the last {k} elements of xs in reverse order', f'xs[-{k}:][::-1]'
        yield f'xs with its first {k} elements in reverse order', f'xs[:{k}][::-1] + xs[{k}:]'
        for v in (0, 1, 5):
            yield f'the first {k} elements of xs followed by {v}', f'xs[:{k}] + [{v}]'
            yield f'xs with {v} inserted at index {k}', f'xs[:{k}] + [{v}] + xs[{k}:]'
        for step in (2, 3):
            yield f'every element of xs at the indices {k}, {k + step}, {k + 2 * step} and so on', f'xs[{k}::{step}]'
    for a in (1, 2):
        for b in (1, 2, 3):
            yield f'xs without its first {a} and last {b} elements', f'xs[{a}:][:-{b}]'


def text_edits() -> Iterator[Part]:
    """Texts made of a text s as a whole."""
    for old, new in ('ae', 'eo', 'st', 'ia', 'b-', 't ', '-.', ' -', 'x1', '01'):
        yield f's with every {old!r} replaced by {new!r}', f's.replace({old!r}, {new!r})'
        yield f's in lower case with every {old!r} replaced by {new!r}', f's.lower().replace({old!r}, {new!r})'
        yield f's reversed, with every {old!r} replaced by {new!r}', f's[::-1].replace({old!r}, {new!r})'
    for k in (2, 3, 4):
        yield f's with each character repeated {k} times', f"''.join(c * {k} for c in s)"
        yield f'the first {k} characters of s in upper case', f's[:{k}].upper()'
        yield f'the last {k} characters of s in upper case', f's[-{k}:].upper()'
        yield f's with its first {k} characters in upper case', f's[:{k}].upper() + s[{k}:]'
        yield f'every character of s at the indices 0, {k}, {2 * k} and so on', f's[::{k}]'
    for mark in '*-.0':
        yield f's with {mark!r} between its characters', f'{mark!r}.join(s)'
        for k in (6, 8, 10):
            yield f's padded with {mark!r} on the left to {k} characters', f's.rjust({k}, {mark!r})'
            yield f's padded with {mark!r} on the right to {k} characters', f's.ljust({k}, {mark!r})'
