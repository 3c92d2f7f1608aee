"""A study of staleness: its plan, its arms, the comparison of their results with the plan, and the page.

plan.py has the decisions made before any result is seen. stages.py makes arms from the plan and reads their results.
Lock-step arms train as programs of arms/ (train_program.py), natural arms as runs of main_train, one process for each
program or run. score.py scores final weights, page.py compares the results with the plan and writes the page, with
figures.py. study.py runs these steps in order.
"""
