r"""Plain characters for the ways in which LaTeX and Unicode write a numeral: '−1{,}234', '½', '\dfrac{3}{4}', '10⁵'.

What is no part of a numeral keeps its backslashes and brackets, by which number_reader.py sees an expression.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

FONT = (
    r'text|textbf|textit|textrm|textnormal|emph|underline|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|boldsymbol|bm|'
    r'operatorname'
)
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
CHARACTERS = str.maketrans(
    _FULL_WIDTH
    | {ord(c): '-' for c in '−‐‑‒–﹣'}
    | {ord(c): '*' for c in '×⋅∙·✕✖∗⨯'}
    | {ord(c): None for c in '\u200b\u200c\u200d\u2060\ufeff\xad\u200e\u200f\u2061\u2062'}  # they are not seen
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
    r"""'0.1\overline{6}' as ' 1/6 '."""
    return _PERIODIC.sub(_spell_periodic, text) if '\\' in text else text


def mask_fractions(text: str) -> str:
    r"""Text of `plain` without the digits of a \frac that is no numeral: \frac{1}{-2}, \frac{x}{2}."""
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
