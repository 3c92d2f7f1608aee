"""Labels of answers with a reward; types.py (UNSCORED) and tasks/scoring/verifier.py have the labels without one."""

# answers that are code: reward 0, except for partial credit and for 'visible_only', which passes the visible tests but
# fails a hidden one
CODE = (
    'wrong', 'syntax', 'exception', 'time_limit', 'memory_limit', 'killed', 'forbidden', 'no_code', 'visible_only',
)  # fmt: skip
SCORED = ('ok', 'unparsed', *CODE)  # 'unparsed': reward 0, no answer could be read in the text

# Counts of an agent's episode, each followed by the name of a tool: its calls in answers, those of them that fit its
# definition, and its results that are errors
CALLED, WELL_FORMED, ERRORS = BY_TOOL = ('called/', 'well_formed/', 'errors/')
