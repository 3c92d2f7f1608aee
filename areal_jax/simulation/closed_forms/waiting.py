"""Waits for c servers, such as reward workers, with arrivals of a Poisson process; and the longest of n.

M/M/c is Erlang's of 1917, M/G/1 that of Pollaczek (1930) and Khinchin (1932).
"""

from __future__ import annotations

import math


def erlang_c(servers: int, load: float) -> float:
    """The probability that a job waits in M/M/c; `load` is rho, the share of all servers that is busy, below 1."""
    offered = servers * load
    last = offered**servers / math.factorial(servers) / (1 - load)
    return last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)


def wait_s(servers: int, load: float, service_s: float) -> float:
    """Mean wait in M/M/c: exponential service of that mean."""
    return erlang_c(servers, load) * service_s / (servers * (1 - load))


def wait_for_one_s(load: float, service_s: float, variation: float) -> float:
    """Mean wait in M/G/1, lambda E[s^2] / (2 (1 - rho)).

    `variation` is the standard deviation of the service over its mean: 0 is M/D/1, 1 is M/M/1.
    """
    return load * service_s * (1 + variation**2) / (2 * (1 - load))


def longest_exponential(n: int) -> float:
    """E[max] of n exponential times over their mean: the harmonic number H_n."""
    return math.fsum(1 / k for k in range(1, n + 1))


def longest_uniform(n: int) -> float:
    """E[max] of n uniform numbers in [0, 1]."""
    return n / (n + 1)


def longest_lognormal(n: int, sigma: float) -> float:
    """E[max] of n lognormal lengths over their mean, asymptotically and loosely: exp(sigma sqrt(2 ln n) - sigma^2 / 2).

    Not cut off: a cap bounds it by cap / mean. `group_moments` has exact values.
    """
    return math.exp(sigma * math.sqrt(2 * math.log(n)) - sigma**2 / 2)
