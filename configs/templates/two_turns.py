"""A template: a workflow of two turns. The policy answers, is asked to check its answer, and answers again.

    --config.rollout.workflow=package:configs/templates/two_turns.py:build

The tokens of the question in between come from the environment: the second turn reads them, and no update trains them.
rollout.max_new_tokens bounds what is sampled in both turns, rollout.context_tokens the whole sequence.
"""

from areal_jax.rollout.workflow import append_environment, count_turns, generate_turn

QUESTION = '='  # what is written between the turns; with a chat model, the text of its next user turn


class TwoTurns:
    def __init__(self, pool, sampling, seed, context_tokens, question):
        self.pool, self.question = pool, question
        self.limits = sampling, seed, context_tokens

    async def run(self, prompt, episode):
        # A resumed episode holds what it had: turns that have ended are not generated again.
        while True:
            reason = await generate_turn(self.pool, prompt, episode, *self.limits)
            if reason == 'cancelled':
                return  # no answer: the finish reason stays None
            if reason == 'length' or count_turns(episode) == 1:
                episode.finish_reason = reason
                return
            append_environment(episode, self.question)


def build(pool, sampling, seed, context_tokens, encode):
    return TwoTurns(pool, sampling, seed, context_tokens, encode(QUESTION))
