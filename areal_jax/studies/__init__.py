"""A study of staleness: its plan, its arms, their results held against the plan, and the page.

plan.py says what is decided before any result is seen. stages.py makes arms of it. Lock-step arms train as programs of
arms/, a process each (stages.py, train_program.py), natural ones as runs of main_train, a process each. score.py
scores final weights, stages.py reads what the arms left, page.py holds it against the plan, page.py and
figures.py write it down, study.py does one after the other.
"""
