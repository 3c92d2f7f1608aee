"""Events of an episode: its end, and what the verifier says of it."""

from typing import Annotated, Literal, NotRequired

from areal_jax.events.schema import Draw, Header, Sample


class FinishEvent(Header):
    """An answer, an episode with all of its rows, was generated to its end."""

    kind: Literal['finish']
    draw: Draw
    sample: Sample
    tokens: Annotated[int, 'tokens of the answer']
    reason: Annotated[
        str,
        'why it ended: stop, length, cancelled; lost: no engine finished it; of an agent also turns, deadline, '
        'agent_error, env_error',
    ]
    versions: Annotated[list[int], 'policy version of each segment']
    lengths: NotRequired[Annotated[list[int], 'tokens of each segment; from version 6 of the log on']]
    turns: NotRequired[Annotated[int, 'of an agent: turns that its program got']]
    rows: NotRequired[Annotated[list[int], 'segments of each row of the episode; one row where it is left out']]
    discarded: NotRequired[Annotated[list[list[int]], '[policy version, tokens] that were taken out of rows again']]
    counts: NotRequired[
        Annotated[list[list[str | int]], 'of an agent: [what its program did, how often], see docs/agents.md']
    ]
    routes: NotRequired[
        Annotated[str, 'sha256, 16 digits, of the experts that prompt and answer have reached, where they are recorded']
    ]
    forks: NotRequired[Annotated[list[str], 'why each row after the first one began']]


class RewardEvent(Header):
    """The verifier judged an answer."""

    kind: Literal['reward']
    draw: Draw
    sample: Sample
    value: Annotated[float, 'the reward; 0 where no attempt gave one']
    label: Annotated[
        str,
        'ok; unparsed: no answer could be read; of code what the answer did; or why there is no reward: timeout, '
        'crash, sandbox, error',
    ]
    attempts: Annotated[int, 'attempts at verification, from 1']


class CheckEvent(Header):
    """The answer was code: what its check took."""

    kind: Literal['check']
    draw: Draw
    sample: Sample
    cpu_s: Annotated[float, 'CPU seconds of the processes of the check; 0: the answer had no code']
    wall_s: Annotated[float, 'wall seconds']
    waiting: Annotated[int, 'answers that waited for a worker when this one came']


class AuditEvent(Header):
    """A scored answer was compared with the gold a second time, in another way."""

    kind: Literal['audit']
    draw: Draw
    sample: Sample
    outcome: Annotated[str, 'agrees or disagrees with the reward; undecided: it cannot tell whether they differ']
