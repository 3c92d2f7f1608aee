r"""Cases of readers that have read the wrong thing: (kind, gold, answer of a model, verdict), twenty of each sort.

A gold is what a file has in its field `answer`: text, or the JSON of a number as bytes. Verdicts: 1 equal, 0 not equal,
'unparsed', and 'refused' for a gold that ends the load (its answer is then not read).
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal[1, 0, 'unparsed', 'refused']
Case = tuple[str, str | bytes, str, Verdict]

_VECTOR = r'\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}'

EXPRESSIONS: list[Case] = [
    ('math', _VECTOR, rf'\boxed{{{_VECTOR}}}', 1),
    ('math', _VECTOR, r'\boxed{-7}', 0),
    ('math', _VECTOR, r'\boxed{\begin{pmatrix} -2 \\ -14 \\ 7 \end{pmatrix}}', 0),
    ('math', r'\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}', r'\boxed{4}', 0),
    ('math', r'\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}', r'#### \begin{bmatrix}1&2\\3&4\end{bmatrix}', 1),
    ('math', r'\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}', r'\boxed{\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}}', 1),
    ('math', 'ab+bc+ca', r'\boxed{ca+ab+bc}', 1),
    ('math', 'ab+bc+ca', r'\boxed{ab+bc}', 0),
    ('math', 'abc', 'The answer is $cab$.', 1),
    ('math', 'xyz+2', r'\boxed{2}', 0),
    ('math', 'xyz+2', r'\boxed{2+zyx}', 1),
    ('math', r'\text{Evelyn}', r'\boxed{Evelyn}', 1),
    ('math', 'dog', r'\boxed{god}', 0),
    ('math', r'a \equiv 3 \pmod 7', r'\boxed{7}', 'refused'),
    ('math', r'\begin{cases} x=1 \\ y=2 \end{cases}', r'\boxed{2}', 'refused'),
    ('math', r'101_2', r'\boxed{101_{2}}', 1),
    ('math', r'101_2', r'\boxed{101_3}', 0),
    ('math', r'x \in [-2, 7]', r'\boxed{7}', 0),
    ('math', r'5\sqrt{3} \text{ cm}^2', r'\boxed{5\sqrt{3}}', 1),
    ('math', '3t', r'\boxed{3}', 0),
    ('math', r'\langle 1, 2 \rangle', r'\boxed{1.2}', 0),
    ('math', r'\operatorname{lcm}(4, 6)', r'\boxed{6}', 0),
    ('math', '3x + 4 where x is even', r'\boxed{4}', 'refused'),
]  # fmt: skip

INTEGERS: list[Case] = [
    ('integer', '7', 'The answer is −7.', 0),
    ('integer', '-7', 'The answer is −7.', 1),
    ('integer', '-7', 'It is −7 degrees.', 1),
    ('integer', '-7', 'So it is $-$7.', 1),
    ('integer', '-7', 'So it is $-7$.', 1),
    ('integer', '1234', r'\boxed{1{,}234}', 1),
    ('integer', '234', r'\boxed{1{,}234}', 0),
    ('integer', '1234', r'\boxed{1\,234}', 1),
    ('integer', '1234', 'That is $1{,}234$ people', 1),
    ('integer', '1500', '#### 1.5e3', 1),
    ('integer', '3', 'The answer is 1.5e3', 0),
    ('integer', '4', r'\boxed{3/4}', 'unparsed'),
    ('integer', '4', 'It is 3/4', 'unparsed'),
    ('integer', '10', r'\boxed{2^{10}}', 'unparsed'),
    ('integer', '3/4', '3/4', 'refused'),
    ('integer', '2^{10}', '1024', 'refused'),
    ('integer', '１２', 'The answer is 12', 1),
    ('integer', '12', r'\boxed{+12.00}', 1),
    ('integer', '5', r'\boxed{5} in 3 steps', 1),
    ('integer', '-12', '<answer>- 12</answer>', 1),
    ('integer', '12', r'\boxed{12\%}', 1),
    ('integer', '2\u202f500', 'It has 2\u00a0500 pages', 1),
    ('integer', '5', 'The answer is 5 or 6.', 'unparsed'),
    ('integer', '7.5', '7', 'refused'),
    ('integer', '7', '7.5', 0),
]

EXACT_NUMBERS: list[Case] = [
    ('math', r'1.6\times10^{-19}', r'\boxed{9.11\times10^{-31}}', 0),
    ('math', r'1.6\times10^{-19}', r'\boxed{1.6 \times 10^{-19}}', 1),
    ('math', r'1.6\times10^{-19}', r'\boxed{0}', 0),
    ('math', r'\frac{1}{3}', r'\boxed{0.333333}', 0),
    ('math', '12', r'\boxed{12.}', 1),
    ('math', '16', r'\boxed{16.}', 1),
    ('math', r'\frac12', r'\boxed{½}', 1),
    ('math', '1234', r'\boxed{1\,234}', 1),
    ('math', '235', r'\boxed{1\,234}', 0),
    ('math', r'2\frac12\%', r'\boxed{2.5\%}', 1),
    ('math', r'2\frac12\%', r'\boxed{1\%}', 0),
    ('math', '6.02e23', r'\boxed{602000000000000000000000}', 1),
    ('math', '602000000000000000000000', r'\boxed{6.02 \times 10^{23}}', 1),
    ('math', '602000000000000000000001', r'\boxed{6.02 \times 10^{23}}', 0),
    ('math', '10^{-19}', r'\boxed{10^{-20}}', 0),
    ('math', r'(1.6\times10^{-19}, 2)', r'\boxed{(9.11\times10^{-31}, 2)}', 0),
    ('math', r'\pi \cdot 10^{-19}', r'\boxed{\pi \cdot 10^{-20}}', 0),
    ('math', '0.1234567', r'\boxed{0.1234568}', 0),
    ('math', r'0.\overline{3}', r'\boxed{\frac{1}{3}}', 1),
    ('math', '-7', 'The temperature is −7', 1),
    ('math', '7', 'The temperature is −7', 0),
    ('math', '1500', 'It is 1.5e3', 1),
    ('number', '6.02e23', r'\boxed{602000000000000000000000}', 1),
    ('number', '1/3', '0.333333', 0),
]

PARTS: list[Case] = [
    ('number', '2', r'\boxed{\frac{1}{-2}}', 'unparsed'),
    ('number', '3', r'\boxed{(3, 2)}', 'unparsed'),
    ('number', 'x^2+3x', '3', 'refused'),
    ('number', '3', r'\boxed{x^2+3x}', 'unparsed'),
    ('number', '25', r'\boxed{25\pi \text{ cm}^2}', 'unparsed'),
    ('number', '3', r'\boxed{3x}', 'unparsed'),
    ('number', '3', r'\boxed{3\sqrt{2}}', 'unparsed'),
    ('number', '3', r'\boxed{[3, 4)}', 'unparsed'),
    ('number', '3', r'#### 3 + 4', 'unparsed'),
    ('number', '12', r'The answer is 12:00.', 'unparsed'),
    ('number', '12', 'The answer is 3 * 4 = 12 apples', 1),
    ('number', '5', '#### 5 cm^2', 1),
    ('number', '5', r'\boxed{5\text{ km/h}}', 1),
    ('number', '90', r'\boxed{90^{\circ}}', 1),
    ('number', '50', r'\boxed{50\%}', 1),
    ('number', '18', 'The answer is 18 dollars.', 1),
    ('number', '5', 'The answer is 5, because 2 + 3 = 5', 1),
    ('number', '5', 'The answer is 5. I hope it is correct.', 1),
    ('number', '5', 'The answer is 5 (five).', 1),
    ('number', '5', r'\boxed{5 (mod 7)}', 'unparsed'),
    ('number', '5', r'\boxed{5(x)}', 'unparsed'),
    ('number', '5', r'\boxed{5, 6}', 'unparsed'),
    ('number', '5', r'\boxed{5 \pm 1}', 'unparsed'),
    ('number', '2', 'There are 2 sides, so 4 corners', 0),
    ('number', '4', 'There are 2 sides, so 4 corners', 1),
    ('number', '3\\pi', '3', 'refused'),
    ('number', '(3, 2)', '3', 'refused'),
    ('number', '3,14', '3', 'refused'),
    ('number', '5 hours and 30 minutes', '5', 'refused'),
]

JSON_NUMBERS: list[Case] = [
    ('number', b'6.02e23', r'\boxed{6.02e23}', 1),
    ('number', b'6.02e23', '602000000000000000000000', 1),
    ('number', b'6.02e23', '601999999999999995805696', 0),
    ('number', b'9007199254740993.0', '9007199254740993', 1),
    ('number', b'9007199254740993.0', '9007199254740992', 0),
    ('integer', b'6.02e23', '602000000000000000000000', 1),
    ('integer', b'1e20', '100000000000000000000', 1),
    ('integer', b'9007199254740993', '9007199254740993', 1),
    ('number', b'0.1', '1/10', 1),
    ('number', b'0.1', '0.1000000000000000055511151231257827', 0),
    ('number', b'1.6e-19', r'1.6 \times 10^{-19}', 1),
    ('number', b'1e-400', '0', 0),
    ('number', b'1e400', '1e400', 1),
    ('number', b'1e999999999', '1', 'refused'),
    ('integer', b'2.5', '2', 'refused'),
    ('integer', b'NaN', '0', 'refused'),
    ('number', b'Infinity', '0', 'refused'),
    ('number', b'true', '1', 'refused'),
    ('exact', b'2.50', '2.50', 1),
    ('exact', b'36.0', '36', 1),
    ('math', b'6.02e23', r'\boxed{602000000000000000000000}', 1),
    ('math', b'0.30000000000000001', r'\boxed{0.3}', 0),
    ('normalised', b'7', '7.', 1),
]

TEXTS: list[Case] = [
    *(
        (kind, 'B', answer, 1)
        for kind in ('normalised', 'math', 'exact')
        for answer in (
            r'\boxed{\text{B}}', '**Answer**: B', 'Answer: $B$', '<answer>B</answer>', '</think><answer>B</answer>',
            'Final Answer: B', 'The answer is **B**.', '**Answer: B**', 'answer： B', r'\boxed{\textbf{B}}',
        )
    ),
    ('math', '5', '<think>or \\boxed{3}?</think><answer>5</answer>', 1),
    ('math', '3', '<think>or \\boxed{3}?</think><answer>5</answer>', 0),
    ('math', '5', '<think>or \\boxed{3}?</think>It is 5', 1),
    ('number', '5', '</think><answer>5</answer>', 1),
    ('integer', '5', '<think>3 4</think>\n<answer>\\boxed{5} of 7</answer>', 1),
    ('normalised', 'B', r'\boxed{(\text{B})}', 1),
    ('math', 'B', r'\boxed{\text{(B)}}', 1),
    ('normalised', 'B', r'\boxed{\text{C}}', 0),
    ('exact', 'C*', 'Answer: C*', 1),
    ('exact', 'U.S.', 'The answer is U.S.', 1),
    ('exact', 'Paris', '**Answer:** paris', 0),
]  # fmt: skip

GOLDS: list[Case] = [
    ('math', '12:00', '12:00', 'refused'),
    ('number', '12:00', '12', 'refused'),
    ('integer', '12:00', '0', 'refused'),
    ('math', r'\frac{1}{0}', r'\boxed{\frac{1}{0}}', 'refused'),
    ('math', r'\frac{1', '1', 'refused'),
    ('math', '???', '???', 'refused'),
    ('math', r'25\%', r'\boxed{0.25}', 0),
    ('math', r'25\%', r'\boxed{\frac14}', 0),
    ('math', r'25\%', r'\boxed{25}', 1),
    ('math', '0.25', r'\boxed{25\%}', 0),
    ('math', r'25\%', r'\boxed{25 \text{ percent}}', 1),
    ('number', '25%', r'\boxed{0.25}', 0),
    ('number', '25%', '#### 25 percent', 1),
    ('integer', r'25\%', '25', 1),
    ('number', '36 or 37', '36', 'refused'),
    ('number', 'thirty-six', '36', 'refused'),
    ('integer', '3 bags of 12 are 36', '36', 'refused'),
    ('number', '1/0', '1', 'refused'),
    ('integer', '1e99999999', '1', 'refused'),
    ('integer', '9' * 5000, '9', 'refused'),
    ('number', '36 eggs', '36', 1),
    ('normalised', '"..."', '...', 'refused'),
    ('math', r'9^{9^{9}}', '1', 'refused'),
]

SORTS: dict[str, list[Case]] = {
    'a gold with words or letters is one of its numbers': EXPRESSIONS,
    'integer lacks signs and numerals': INTEGERS,
    'numbers are compared at six decimals': EXACT_NUMBERS,
    'the first number of an expression counts': PARTS,
    'JSON numbers lose digits': JSON_NUMBERS,
    'marks around a text are part of it': TEXTS,
    'a gold that equals nothing passes the load; percent': GOLDS,
}
