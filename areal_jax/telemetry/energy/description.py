"""What a run says about its joules: which are measured, with which meter, which are modelled, and for which devices."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from areal_jax.telemetry.energy.meters import NVML, POWER, RAPL, DeviceSet, Meter

MODELLED = 'modelled'  # in place of the name of a meter


class EnergySource(TypedDict):
    """Where joules are from."""

    meter: str  # NVML, RAPL or MODELLED
    devices: str  # that it is of
    sentence: str


class EnergyFacts(TypedDict):
    """What facts.json keeps of the account of a run."""

    sources: list[EnergySource]
    watts: Mapping[str, str]  # of modelled joules: chip and state -> published values and their source
    note: str  # what is not known, and why; '' where all is
    lost: list[str]  # meters that failed in the run, a sentence each


def describe_sources(sets: Sequence[DeviceSet], meters: Collection[Meter], models: bool) -> list[EnergySource]:
    """One entry for each meter, and one for a model."""
    sentences = {
        NVML: 'Measured with the total energy counters of NVML: whole boards, whoever uses them.',
        RAPL: 'Measured with RAPL: whole packages without DRAM, with all that runs on this machine.',
    }
    found: list[EnergySource] = [
        {'meter': meter.name, 'devices': meter.devices, 'sentence': sentences[meter.name]} for meter in meters
    ]
    if models:
        sentence = 'Modelled: seconds by state times the lowest and the highest published watts.'
        found.append({'meter': MODELLED, 'devices': describe_devices(sets), 'sentence': sentence})
    return found


def describe_watts(sets: Sequence[DeviceSet]) -> dict[str, str]:
    """'NVIDIA H200, idle' -> '80 to 130 W: ...'; nothing of chips whose watts are not published."""
    kinds = sorted({found.kind for found in sets} & POWER.keys())
    return {f'{kind}, {state.replace("_", " ")}': text for kind in kinds for state, text in POWER[kind].sources.items()}


def describe_devices(sets: Sequence[DeviceSet]) -> str:
    """'2 x NVIDIA H200, 1 x NVIDIA L4'."""
    counts: collections.Counter[str] = collections.Counter()
    for found in sets:
        counts[found.kind] += found.devices
    return ', '.join(f'{count} x {kind}' for kind, count in sorted(counts.items()))


def describe_unknown(sets: Sequence[DeviceSet], meters: Collection[Meter], reasons: Sequence[str]) -> str:
    """The sentence on devices that have neither a meter nor published watts.

    Args:
      meters: which measure something else.
      reasons: why other meters cannot be read.
    """
    others = ''.join(f'; only those of {meter.devices} are measured' for meter in meters)
    kinds = ', '.join(sorted({repr(found.kind) for found in sets}))
    because = ''.join(f'{reason}; ' for reason in reasons)
    return f'No joules of {describe_devices(sets)} are known ({because}no watts of {kinds} are in the table){others}.'
