"""Seconds of a publication over sockets from every process of a learner to every engine, publication.channel='stream'.

Each of P learner processes, on hosts of their own, sends its shards, S = V / P bytes of a version of V, to each of N
engines of d devices, n of them on a host (publication/shard_plan.py). The three steps follow one another, because a
version is announced when all processes have it, and an engine loads it when it has all of it:

    late     = prepare + transfer + load
    prepare  = S / D + S s                               from one device after the other into the buffer of the sender
    transfer = max(N S / B, n V / B, V / F f) + l        the senders' links, the engines' links, the Python of an engine
    load     = V c + V / (d D) + V / (d M)               one copy on the host, then to the devices and digested there

B is the bandwidth of a host's network in each direction, M of a device's memory; the other prices are of `StreamCosts`.
Engines decode meanwhile, and stop only to swap.
"""

from __future__ import annotations

import dataclasses

NODE = 8  # accelerators of a host
LINK_BYTES_S = 12.5e9  # of a host's network, in each direction: 100 Gb/s
_FRAME_BYTES = 1 << 20  # publication/carriers/stream_socket.py


@dataclasses.dataclass(frozen=True)
class StreamCosts:
    """What it costs to move bytes on a host: CPU seconds of one core, unless stated otherwise."""

    store_byte_s: float  # s: into the buffer of a sender
    send_byte_s: float  # from there into a socket, with the checksum of the frames
    receive_byte_s: float  # from a socket into the buffer of a reader, with the checksum
    frame_s: float  # f: of Python, for each frame that an engine receives; its threads take turns
    copy_byte_s: float  # c: of a leaf into the buffers of an engine
    digest_byte_s: float  # of a leaf on the host; 0 of them where devices digest
    device_bytes_s: float = 25e9  # D: between the host and a device, 0.8 of PCIe 4 x 16; bytes a second
    latency_s: float = 0.01  # l: the leader's words with its processes and with engines; an assumption


# python -m benchmarks.host --rows=stream: benchmarks/results/host_stream.json
_BYTES, _FRAMES = 1 << 28, 20_000
MEASURED_STREAM = StreamCosts(
    store_byte_s=0.03196 / _BYTES, send_byte_s=0.1005 / _BYTES,
    receive_byte_s=0.08125 / _BYTES, frame_s=1.607 / _FRAMES,
    copy_byte_s=0.02221 / _BYTES, digest_byte_s=0.0302 / _BYTES,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StreamedVersion:
    """A whole version, its senders and its readers."""

    nbytes: float
    processes: int  # of the learner
    engines: int
    engines_of_host: float
    devices: int  # of an engine
    memory_bytes_s: float  # bandwidth of a device's memory
    costs: StreamCosts
    link_bytes_s: float = LINK_BYTES_S

    @property
    def sent_bytes(self) -> float:
        """Bytes that each process of the learner sends, to all engines."""
        return self.engines * self.nbytes / self.processes

    @property
    def received_bytes(self) -> float:
        """Bytes that each host with engines receives."""
        return self.engines_of_host * self.nbytes

    @property
    def prepare_s(self) -> float:
        return self.nbytes / self.processes * (1 / self.costs.device_bytes_s + self.costs.store_byte_s)

    @property
    def transfer_s(self) -> float:
        on_links_s = max(self.sent_bytes, self.received_bytes) / self.link_bytes_s
        return max(on_links_s, self.nbytes / _FRAME_BYTES * self.costs.frame_s) + self.costs.latency_s

    @property
    def load_s(self) -> float:
        on_devices_s = (1 / self.costs.device_bytes_s + 1 / self.memory_bytes_s) / self.devices
        return self.nbytes * (self.costs.copy_byte_s + on_devices_s)

    @property
    def host_digest_s(self) -> float:
        """Seconds that `load_s` grows by where devices do not digest."""
        return self.nbytes * self.costs.digest_byte_s

    @property
    def late_s(self) -> float:
        """Seconds from the end of an update until an engine has the version and can swap to it."""
        return self.prepare_s + self.transfer_s + self.load_s

    @property
    def sending_cores(self) -> float:
        """Cores of a learner's host that are busy during the transfer."""
        return self.sent_bytes * self.costs.send_byte_s / self.transfer_s

    @property
    def receiving_cores(self) -> float:
        """Cores of an engine's host that are busy during the transfer."""
        return self.received_bytes * self.costs.receive_byte_s / self.transfer_s
