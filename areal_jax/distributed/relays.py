"""Large commands on their way to many processes: who gets one passes it on. jax-free.

To send a batch to 64 processes one by one costs a controller 16 times what 4 cost, in CPU time and on its network link.
So where there are more than FANOUT processes it sends large commands to the first FANOUT only, and process i passes
them on to the next ones, `children_of(i)`. Small commands, all answers and the watch over lost processes go directly.

Used by peers.py on the side that commands, and by follower.py on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.distributed.handshake import Listener

if TYPE_CHECKING:
    from areal_jax.distributed.peers import Peer

FANOUT = 4
LEAST_BYTES = 1 << 20  # of a command that is passed on: smaller ones cost little, and arrive sooner directly


def children_of(index: int, count: int) -> range:
    """To whom process `index` of `count` passes commands on; -1 = the controller."""
    return range(min(FANOUT * (index + 1), count), min(FANOUT * (index + 2), count))


def join_relays(
    leader: Peer, listener: Listener | None, children: Sequence[str], has_parent: bool, deadline_s: float
) -> bool:
    """Connects this process to those that it passes commands on to, and accepts the one that passes them to it.

    Commands that come from there are executed as if `leader` had sent them. False where this process does not listen.

    Raises LostPeerError where one of them does not come within `deadline_s`.
    """
    if listener is None:
        return False
    leader.relay_to = [listener.connect(address, deadline_s).connection for address in children]
    if has_parent:
        leader.read_also(listener.accept(deadline_s).connection)
    return True
