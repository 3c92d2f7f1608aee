"""Many runs as one program: arms of a study in lock-step on token reversal, trained together as one vmap.

    arm.py                a config with a name; the fields in which arms of one program may differ
    setting.py            the settings that all arms share, and the constants of each arm
    answer_generation.py  answers to the prompts of a batch; frictions: which answers and rewards are disturbed, and how
    arm_update.py         a batch becomes log-probs, rewards, advantages, minibatches and optimizer steps
    arm_training.py       from configs to results: updates in a loop on the device, arms side by side, and their metrics

Shapes, in addition to the shapes in areal_jax/__init__.py: U updates of a run, C updates of a call of the program; for
the answers: B groups, G answers of a group, P tokens of a prompt, A tokens of an answer. They are equal for all
answers.
"""
