"""Labels of answers that have a reward; UNSCORED of types.py and tasks/scoring/verifier.py have those without."""

# an answer of code: reward 0, but for partial credit, and for 'visible_only', which passes the tests and fails a hidden
# one
CODE = (
    'wrong', 'syntax', 'exception', 'time_limit', 'memory_limit', 'killed', 'forbidden', 'no_code', 'visible_only',
)  # fmt: skip
SCORED = ('ok', 'unparsed', *CODE)  # 'unparsed': reward 0, no answer could be read in the text
