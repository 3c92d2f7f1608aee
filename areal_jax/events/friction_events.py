"""The event of a friction (section `friction` of the config): a part of the schema, which is in schema.py."""

from typing import Annotated, Literal, NotRequired

from areal_jax.events.schema import Draw, Header, Sample


class FrictionEvent(Header):
    """An answer, what is reported of it, or its reward was changed on purpose."""

    kind: Literal['friction']
    draw: Draw
    sample: Sample
    friction: Annotated[
        str, 'constant, logprobs, temperature: of the actor, before `finish`; unrewarded, reward: before `consume`'
    ]
    before: Annotated[
        list[float],
        'reported log-probs of the generated tokens (temperature: of the distribution that was sampled), or the reward',
    ]
    after: Annotated[list[float], 'the same as the learner gets it']
    tokens: NotRequired[Annotated[list[int], 'constant: the tokens that were generated']]
