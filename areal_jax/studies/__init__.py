"""A study of staleness: its plan, its arms, their results held against the plan, and the page.

plan.py says what is decided before any result is seen. stages.py makes arms of it. Lock-step arms train as programs of
arms/, a process each (train_program.py), natural ones as runs of main_train, a process each; it reads what the arms
left. score.py scores final weights, page.py holds the results against the plan and writes them down with figures.py,
study.py does one after the other.
"""
