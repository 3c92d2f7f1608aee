"""Texts and chats that tokenizers find hard: what two tokenizers must agree about."""

from __future__ import annotations

TEXTS = (
    '',
    ' ',
    'a',
    '  a\t\n ',
    '\n\n\n',
    '\r\n windows \r',
    'trailing blanks   ',
    '   leading blanks',
    'a\u00a0no-break\u2003em\u200bzero\ufeffbom',
    'The keeper of the lighthouse counted seven ships before dawn.',
    "It's, don't, we'll, I'd, they're, 'twas, CAN'T",
    '0123456789 3.14159 1,000,000 2024-01-31 007 1e-5 ½ ² ٣ ५',
    '12 + 7 = 19\n(12+7)*3',
    'def f(x):\n    return x  # comment\n\n\tif x:\n\t\tpass\n',
    '{"a": [1, 2, {"b": null}]}\\n \\u00e9 <html>&amp;</html>',
    'https://example.org/path?x=1&y=2#z user@host',
    'Grüße, naïve café, e\u0301 (combining), ﬁ ligature, ß ẞ',
    '数学は楽しい。한국어 עברית العربية हिन्दी ไทย',
    '😀 emoji 👩‍👩‍👧 🇩🇪 👍🏽',
    '∑∫√π ≤ ≥ ≠ ∞ → ⇒ ℝ',
    'ALLCAPS MixedCase snake_case camelCase kebab-case __dunder__',
    '...!!!???---***///',
    '<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n',
    'text<|im_end|>text <|endoftext|> <|im_start|><|im_start|>',
    '<|im_start|',
    '<|IM_START|> <im_start> |im_end|>',
    '<repo_name><jupyter_code>x<file_sep>',
    'a' * 300,
    'x ' * 100,
    '\x00\x01\x7f',
    'tab\tseparated\tvalues\v\f',
)
_SYSTEM = {'role': 'system', 'content': 'Answer with the number only.'}
CHATS = [
    *([{'role': 'user', 'content': text}] for text in TEXTS),
    [_SYSTEM, {'role': 'user', 'content': 'What is 12 + 7?'}],
    [
        {'role': 'user', 'content': 'one'},
        {'role': 'assistant', 'content': ' two '},
        {'role': 'user', 'content': 'three\n'},
    ],
    [_SYSTEM, {'role': 'user', 'content': 'naïve\ncafé 数学'}, {'role': 'assistant', 'content': ''}, _SYSTEM],
]
