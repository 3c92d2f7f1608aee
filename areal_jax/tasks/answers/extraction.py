"""Finds the final answer in a text: in <answer> or \boxed{}, after '####', after 'answer is', else the last line.

The same searches read the answers of a model and the gold of a file, for every kind of answer. Each search takes time
linear in the text, because a policy may generate any text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

FONT = (
    r'text|textbf|textit|textrm|textnormal|emph|underline|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|boldsymbol|bm|'
    r'operatorname'
)
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
CHARACTERS = str.maketrans(
    _FULL_WIDTH
    | {ord(c): '-' for c in '−‐‑‒–﹣'}
    | {ord(c): '*' for c in '×⋅∙·✕✖∗⨯'}
    | {ord(c): None for c in '\u200b\u200c\u200d\u2060\ufeff\xad\u200e\u200f\u2061\u2062'}  # invisible
    | {ord(c): ' ' for c in '\u3000\u2000\u2001\u2002\u2003\u2004\u2005'}
    | {'⁄': '/', '∕': '/', '﹪': '%', '٪': '%', '٫': '.', '٬': ',', '≃': '≈', '≅': '≈', 'º': '°', '˚': '°'}
)
_THIN = '\u2006\u2007\u2008\u2009\u200a\u202f\u205f\xa0'
_FOREIGN_DIGIT = re.compile(r'(?![0-9])\d')
_RAISED = re.compile('[⁰¹²³⁴-⁹⁺⁻]+')
_RAISED_CHARACTERS = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻', '0123456789+-')
_VULGAR = re.compile('(-?)([¼-¾⅐-⅞↉])')
_THIN_GROUP = re.compile(rf'(?<=[0-9])[{_THIN}](?=[0-9]{{3}}(?![0-9]))')

_LOOK = re.compile(
    r'\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|rm|bf|it|tt|sf)(?![A-Za-z])|\\color\s*\{[^{}]*\}|\\!|\\[()\[\]]'
)
_GROUP_MARK = re.compile(r'(?<=[0-9,])(?:\{,\}\s?|\\text\{,\}|\\[,;:> ]|~)(?=[0-9]{3}(?![0-9]))')
_BLANK = re.compile(r'\\[,;:> ]|~|\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|\\hspace\*?\{[^{}]*\}')
_SMALL_WORD = re.compile(rf'\\(?:{FONT})\s*(?:\{{([^{{}}]*)\}}|(?<=text)([0-9]))')
_DEGREE = re.compile(r'\^\s*\{?\s*\\circ\s*\}?|\^\s*\{?\s*°\s*\}?|\\degree(?![A-Za-z])|\\textdegree(?![A-Za-z])')
_ORDINAL = re.compile(r'\^\s*\{?\s*(st|nd|rd|th)(?![A-Za-z])\s*\}?')
_NAMES = {
    'times': '*', 'cdot': '*', 'ast': '*', 'approx': '≈', 'simeq': '≈', 'pounds': '£', 'euro': '€', 'yen': '¥',
    'textdollar': '$', 'texteuro': '€', 'percent': '%', 'lbrace': r'\{', 'rbrace': r'\}',
}  # fmt: skip
_NAMED = re.compile(rf'\\({"|".join(_NAMES)})(?![A-Za-z])(?:\{{\}})?')
_ESCAPED = re.compile(r'\\([$%€£&#])')
_PART = r'[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++'
_FRACTION = re.compile(
    rf'(-\s*)?\\(?:[dtc]?frac|nicefrac|sfrac)\s*(?:\{{\s*([-+]?)\s*({_PART})\s*\}}|([0-9]))\s*(?:\{{\s*({_PART})\s*\}}|([0-9]))'
)
_OTHER_FRACTION = re.compile(r'\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}')
_PERIODIC = re.compile(r'(-?)([0-9]{0,30})\.([0-9]{0,30})\\(?:overline|bar)\s*(?:\{\s*([0-9]{1,30})\s*\}|([0-9]))')


def plain(text: str) -> str:
    """The text with the signs, digits, separators, fractions and powers of numerals in ASCII: a/b, 1234, -, 10^{5}."""
    if not text.isascii():
        text = to_ascii(text)
    if '\\' in text or '{,}' in text or '~' in text:
        text = _from_latex(text)
    return text


def join_groups(text: str) -> str:
    r"""Text in LaTeX without separators of thousands: '1{,}234' and '1\,234' as '1234'."""
    return _GROUP_MARK.sub('', text)


def spell_periodic(text: str) -> str:
    r"""Spells periodic decimals as fractions: '0.1\overline{6}' as ' 1/6 '."""
    return _PERIODIC.sub(_spell_periodic, text) if '\\' in text else text


def mask_fractions(text: str) -> str:
    r"""Removes the digits of each \frac that is no numeral from text of `plain`: \frac{1}{-2}, \frac{x}{2}."""
    return _OTHER_FRACTION.sub(r'\\frac ', text) if 'frac' in text else text


def to_ascii(text: str) -> str:
    """The text with the signs, digits, blanks, fractions and raised digits of Unicode as ASCII writes them."""
    text = _THIN_GROUP.sub('', text.translate(CHARACTERS))
    if not text.isascii():
        text = _FOREIGN_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
        # The blank before a fraction makes '1½' the mixed number '1 1/2'.
        text = _VULGAR.sub(_spell_vulgar, text)
        text = _RAISED.sub(lambda raised: f'^{{{raised[0].translate(_RAISED_CHARACTERS)}}}', text)
        text = re.sub(rf'[{_THIN}]', ' ', text)
    return text


def _spell_vulgar(match: re.Match[str]) -> str:
    return f' {match[1]}' + unicodedata.normalize('NFKC', match[2]).replace('\u2044', '/')


def _from_latex(text: str) -> str:
    text = _GROUP_MARK.sub('', _LOOK.sub('', text))
    text = _ESCAPED.sub(r'\1', _NAMED.sub(lambda name: _NAMES[name[1]], _BLANK.sub(' ', text)))
    for _ in range(2):  # \textbf{\text{5}}
        text = _SMALL_WORD.sub(_spell_word, text)
    text = _DEGREE.sub('°', text)
    text = _ORDINAL.sub(r'\1', text)
    return _FRACTION.sub(_spell_fraction, spell_periodic(text))


def _spell_word(match: re.Match[str]) -> str:
    content = match[1] if match[1] is not None else match[2]
    return content if content and content.strip() == content and content[0] in '0123456789.,-+' else f' {content} '


def _spell_fraction(match: re.Match[str]) -> str:
    minus, sign, over, digit, under, below = match.groups()
    negative = bool(minus) != (sign == '-')
    return f' {"-" if negative else ""}{over or digit}/{under or below} '


def _spell_periodic(match: re.Match[str]) -> str:
    r"""'0.1\overline{6}' as '1/6': all digits less those before the period, over nines and zeros."""
    sign, whole, fixed, *period = match.groups()
    repeated = period[0] or period[1]
    nines = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    value = Fraction(int(f'{whole}{fixed}{repeated}') - int(f'0{whole}{fixed}'), nines)
    return f' {sign}{value.numerator}/{value.denominator} '


MARK = '####'  # before the final answer of a worked solution, as in GSM8K
_THOUGHT_END = '</think>'
_BOX_TOKEN = re.compile(r'\\{1,2}(?:boxed|fbox)(?:\s*(\{)|[ ]+([^\s${}\\]+))|\\.|([{}])', re.DOTALL)
_PHRASE = re.compile(r'(?<!\w)answer(?!\w)\s*+(?:[*_`]++\s*+)?+(?:is(?!\w)(?:\s*+[*_`]*+[:：])?|[:：=])', re.IGNORECASE)
_HOPE = re.compile(r'I hope (?:it|this|that) is correct[.!]?')  # models write it after an answer
_EMPHASIS = ('**', '__', '*', '_', '`')
_WHOLE = (  # marks around a whole text; the text inside does not have the same mark
    re.compile(r'\*\*((?:[^*]|\*(?!\*))+)\*\*', re.DOTALL),
    re.compile(r'\*([^*]+)\*'),
    re.compile(r'__(?![a-z][a-z0-9_]*__$)([^_]+)__'),  # __init__ is a name, not a bold word
    re.compile(r'_([^_]+)_'),
    re.compile(r'(`+)([^`]+)\1'),
    re.compile(r'\$\$((?:[^$\\]|\\.)+)\$\$', re.DOTALL),
    re.compile(r'\$((?:[^$\\]|\\.)+)\$', re.DOTALL),
    re.compile(r'\\\(((?:[^\\]|\\[^)])+)\\\)', re.DOTALL),
    re.compile(r'\\\[((?:[^\\]|\\[^\]])+)\\\]', re.DOTALL),
)
_GROUP = re.compile(rf'(?:\\(?:{FONT}|textcolor\s*\{{[^{{}}]*\}})\s*)?\{{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)
_MARKS = '*_`$\\{'  # how a mark begins
_MOST_LAYERS = 8  # of marks that are removed: bounds the time


class Marked(NamedTuple):
    """An answer that a text marks."""

    text: str  # as it is written, without blanks around it
    is_alone: bool = True  # a box or an <answer>: no other mark counts
    end: int = 0  # for another mark: the end of its line, after which the text continues


def final_text(text: str) -> str | None:
    """The final answer as it is written, without blanks and marks around it; None for a text of blanks."""
    text = without_thoughts(text)
    found = last_marked(text) or text.rstrip().rpartition('\n')[2].strip()
    return unwrap(found) if found else None


def last_marked(text: str) -> str | None:
    """The first of `marked_answers`; None without any."""
    marked = next(marked_answers(text), None)
    return marked.text if marked else None


def without_thoughts(text: str) -> str:
    """The text after the last '</think>', or, if nothing follows, the text before it; else the whole text."""
    thoughts, mark, rest = text.rpartition(_THOUGHT_END)
    if not mark:
        return text
    return rest if rest.strip() else thoughts


def marked_answers(text: str) -> Iterator[Marked]:
    r"""The text in the last <answer>, else in the last \boxed{}; else after the last '####', after 'answer is' or ':'.

    In an <answer>, the other marks are looked for first. A box or an <answer> that is not empty is the only result.
    After other marks an answer reaches to the end of its line. Empty answers are left out.
    """
    if '</' in text and (tagged := _last_tagged(text)) is not None:
        yield Marked(last_marked(tagged) or tagged)
    elif 'box' in text and (boxed := last_boxed(text)):
        yield Marked(boxed)
    else:
        for find in (_after_mark, _after_phrase):
            if (found := find(text)) and found.text:
                yield found


def unwrap(text: str) -> str:
    r"""The text without marks around the whole of it: **, $, \( \), \text{}, braces, backticks."""
    text = text.strip()
    for _ in range(_MOST_LAYERS):
        if not text or text[0] not in _MARKS:
            break
        match = next((match for mark in _WHOLE if (match := mark.fullmatch(text))), None)
        inner = match[match.lastindex or 1] if match else _inside_braces(text)
        if not inner.strip():
            break
        text = inner.strip()
    return text


def _inside_braces(text: str) -> str:
    """The text in the braces that enclose the whole text; '' if no braces do."""
    if not (opening := _GROUP.match(text)):
        return ''
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {'{': 1, '}': -1}.get(brace[0], 0)
        if not depth:
            return text[opening.end() : brace.start()] if brace.end() == len(text) else ''
    return ''


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed, of nested ones the inner one; None without any."""
    opened: list[int | None] = []  # of each open brace: where the content of its box begins, None for another brace
    start, content = -1, None
    for token in _BOX_TOKEN.finditer(text):
        brace, bare, other = token.groups()
        if brace:
            opened.append(token.end())
        elif bare:
            start, content = token.start(), bare
        elif other == '{':
            opened.append(None)
        elif other == '}' and opened:
            begin = opened.pop()
            if begin is not None and begin > start:
                start, content = begin, text[begin : token.start()]
    return content.strip() if content else None


def _last_tagged(text: str) -> str | None:
    """The text between the last <answer> and </answer>; None without them, or if it is blank."""
    if '</answer>' not in (lower := _lower(text)):
        return None
    end = lower.rfind('</answer>')
    begin = lower.rfind('<answer>', 0, end)
    return (text[begin + len('<answer>') : end].strip() or None) if begin >= 0 else None


def _after_mark(text: str) -> Marked | None:
    if (start := text.rfind(MARK)) < 0:
        return None
    line, end = _first_line(text, start + len(MARK))
    if line.startswith(':'):
        line = line.lstrip(': ')
    inner = _after_phrase(line) if len(line) > len('answer:') else None  # '#### Answer: 5'
    return Marked(inner.text if inner and inner.text else line, False, end)


def _after_phrase(text: str) -> Marked | None:
    lower, start = _lower(text), len(text)
    while (start := lower.rfind('answer', 0, start)) >= 0:
        if match := _PHRASE.match(text, start):
            line, end = _first_line(text, match.end())
            return Marked(_clean_line(text[text.rfind('\n', 0, start) + 1 : start], line), False, end)
    return None


def _clean_line(before: str, line: str) -> str:
    """The line after 'answer is', without the end of an emphasis that began before it and without a full stop."""
    for mark in _EMPHASIS:
        if before.count(mark) % 2 and line.count(mark) % 2:
            line = line.removeprefix(mark) if line.startswith((mark + ' ', mark + '\t')) else line.removesuffix(mark)
        elif line.startswith((mark + ' ', mark + '\t')):
            line = line.removeprefix(mark)  # '**Answer:** 42'
    line = line.strip()
    if (hope := line.find('I hope')) > 0 and _HOPE.fullmatch(line, hope):
        line = line[:hope].rstrip()
    while (stripped := unwrap(line).removesuffix('.').rstrip()) != line:
        line = stripped
    return line


def _lower(text: str) -> str:
    lower = text.lower()
    return lower if len(lower) == len(text) else ''.join(c.lower() if c.isascii() else c for c in text)


def _first_line(text: str, start: int) -> tuple[str, int]:
    """The first line after `start` that is not blank, and its end."""
    rest = text[start:].lstrip()
    line, _, after = rest.partition('\n')
    return line.strip(), len(text) - len(after)
