"""The plan of shards: each element comes from one process that holds it, and arrives at each host once."""

import collections
import dataclasses
import functools
import itertools
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.aot.topology import describe_accelerator
from areal_jax.config.cluster import parse_learner
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import logical_axes
from areal_jax.publication.shard_plan import (
    LeafLayout,
    Shard,
    count_elements,
    divide_leaves,
    find_overlap,
    find_runs,
    layouts_of,
    leaf_path,
    needed_boxes,
    parse_shard,
    route,
)
from areal_jax.rollout.decode.generate import weight_shardings
from areal_jax.sharding.rules import mesh_of, param_shardings

AXES = ('data', 'fsdp', 'expert', 'tensor')
DEVICES = describe_accelerator('512 x H100', 0).devices  # described ones: a sharding asks for nothing else


def count_covers(shape, boxes, like):
    """How many of `boxes` cover each cell of the grid that the bounds of `like` draw, and the elements of each cell."""
    bounds = [sorted({0, size, *(end for box in like for end in box[axis])}) for axis, size in enumerate(shape)]
    counts = np.zeros([len(ends) - 1 for ends in bounds], int)
    for box in boxes:
        counts[tuple(slice(*np.searchsorted(ends, span)) for ends, span in zip(bounds, box, strict=True))] += 1
    return counts, functools.reduce(np.multiply.outer, map(np.diff, bounds), np.int64(1))


def require_sound_shards(layouts, shards):
    """Every element is in one shard, of a process that holds it, of at most 2 GiB, whose name says what it is."""
    by_path = collections.defaultdict(list)
    for process, own in shards.items():
        names = [shard.name for shard in own]
        assert names == sorted({*names})
        for shard in own:
            layout = layouts[shard.path]
            holders = [held for box, held in layout.holders.items() if find_overlap(box, shard.box) == shard.box]
            assert layout.shape == () or process in holders[0]
            assert shard.size * layout.itemsize <= 2 << 30
            assert parse_shard(shard.name, tuple(stop - start for start, stop in shard.box)) == shard
            assert leaf_path(shard.name) == shard.path
            by_path[shard.path].append(shard.box)
    for path, layout in layouts.items():
        assert (count_covers(layout.shape, by_path[path], by_path[path])[0] == 1).all(), path


def require_exact_transfers(layouts, needed, transfers):
    """Each host gets each element that it needs once, and no other; returns received over needed bytes by host."""
    by_leaf, received = collections.defaultdict(list), collections.Counter()
    for transfer in transfers:
        by_leaf[transfer.receiver, transfer.path].append(transfer.box)
        received[transfer.receiver] += transfer.nbytes
    must = collections.Counter()
    for host, leaves in needed.items():
        for path, boxes in leaves.items():
            sent = by_leaf.pop((host, path))
            got, elements = count_covers(layouts[path].shape, sent, [*sent, *boxes])
            wanted, _ = count_covers(layouts[path].shape, boxes, [*sent, *boxes])
            np.testing.assert_array_equal(got, wanted > 0)
            must[host] += int((elements * (wanted > 0)).sum()) * layouts[path].itemsize
    assert not by_leaf
    return {host: received[host] / must[host] for host in needed}


def count_sent(shards, layouts):
    """Bytes of a version by process."""
    return [sum(shard.size * layouts[shard.path].itemsize for shard in own) for own in shards.values()]


# 200 random pairs of meshes and layouts.


def draw_sizes(rng, devices):
    """Sizes of four axes, whose product is `devices`, a power of two."""
    cuts = np.sort(rng.integers(0, devices.bit_length(), 3))
    return [1 << int(end - start) for start, end in itertools.pairwise([0, *cuts, devices.bit_length() - 1])]


def draw_leaves(rng):
    """Shapes by path: norms, matrices in lists and stacked, experts, a vocabulary, odd sizes; from 2 bytes to 3 GB."""
    width, inner, layers, experts, vocabulary = (
        int(rng.choice(sizes))
        for sizes in ((48, 512, 4096), (96, 1536, 768), (3, 8), (8, 30, 64), (1000, 50257, 32000))
    )
    return {
        'scalar': (), 'final_norm': (width,), 'odd': (7, 13, 5), 'embedding': (vocabulary, width),
        **{f'layers/{layer}/up': (width, inner) for layer in range(layers)},
        'layers/norm': (layers, width), 'layers/down': (layers, inner, width),
        'mixture/up': (experts, width, inner), 'layers/mixture/up': (layers, experts, width, inner),
    }  # fmt: skip


def draw_tree(rng, shapes, sizes, devices):
    """Leaves over a mesh: each of its axes cuts an axis of a leaf, drawn among those that it divides, or none."""
    mesh = Mesh(np.reshape(np.array(devices), sizes), AXES)
    tree = {}
    for path, shape in shapes.items():
        spec = [()] * len(shape)
        left = list(shape)  # of each axis, on a device
        for name in AXES[1:]:
            fits = [axis for axis, length in enumerate(left) if length % mesh.shape[name] == 0]
            if fits and rng.random() < 0.8:
                axis = int(rng.choice(fits))
                spec[axis], left[axis] = (*spec[axis], name), left[axis] // mesh.shape[name]
        tree[path] = jax.ShapeDtypeStruct(shape, np.float16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    return tree


@pytest.mark.parametrize('seed', range(200))
def test_each_host_of_an_engine_gets_each_element_once(seed):
    rng = np.random.default_rng(seed)
    processes, local = int(rng.choice((2, 4, 8, 16))), int(rng.choice((1, 2, 4, 8)))
    shapes = draw_leaves(rng)
    learner = draw_tree(rng, shapes, draw_sizes(rng, processes * local), DEVICES[: processes * local])
    layouts = layouts_of(learner, lambda device: device.id // local)
    shards = divide_leaves(layouts)
    require_sound_shards(layouts, shards)
    sent = count_sent(shards, layouts)
    # boxes stay whole below 64 KiB for each process that holds them, or below 1/128 of what a process sends
    assert max(sent) <= np.mean(sent) + max(processes << 16, np.mean(sent) / 128)

    hosts, each = int(rng.choice((1, 2, 4))), int(rng.choice((1, 2, 8)))
    engine = draw_tree(rng, shapes, draw_sizes(rng, hosts * each), DEVICES[: hosts * each])
    needed = needed_boxes(engine, lambda device: device.id // each)
    assert len(needed) == hosts
    transfers = route(shards, needed, dict.fromkeys(shapes, 2))
    assert set(require_exact_transfers(layouts, needed, transfers).values()) == {1.0}


# Models with the project's own shardings.


SMALL = ModelConfig(
    49152, 576, 30, 8, 4, 64, 1536, 1e6, family='qwen3', qk_norm=True, tie_embeddings=True
)  # 133 million weights


def place(decoder, shardings):
    describe = lambda leaf, over: jax.ShapeDtypeStruct(leaf.shape, np.float16, sharding=over)
    return jax.tree.map(describe, decoder.abstract(), shardings)


@pytest.mark.parametrize(
    ('model', 'learner', 'processes', 'expert', 'tensor', 'hosts', 'cut'),
    [
        (SMALL, 'data=2,fsdp=4', 4, 1, 2, 1, '^$'),
        ('qwen3_8b', 'data=2,fsdp=8,tensor=4', 8, 1, 8, 1, '^$'),
        ('qwen3_8b', 'fsdp=16', 2, 1, 2, 2, 'weight|embedding|head'),
        ('qwen3_30b_a3b', 'data=2,fsdp=4,expert=8', 8, 2, 4, 2, '/experts/'),
        ('qwen3_30b_a3b', 'fsdp=2,expert=4,tensor=4', 8, 8, 1, 8, '/experts/'),
    ],
)
def test_models_arrive_from_equally_busy_processes(model, learner, processes, expert, tensor, hosts, cut):
    """`cut`: the leaves of which each host of the engine gets its own part alone. Models of 4 layers: all are alike."""
    shape = model if isinstance(model, ModelConfig) else read_hf_config(f'configs/shapes/{model}')
    config, layout = dataclasses.replace(shape, n_layers=4), parse_learner(learner)
    decoder, mesh = Decoder(config), mesh_of(layout, DEVICES[: layout.devices])
    copy = place(decoder, param_shardings(decoder.abstract(), logical_axes(config), mesh, 'fsdp_tensor'))
    layouts = layouts_of(copy, lambda device: device.id * processes // layout.devices)
    shards = divide_leaves(layouts)
    require_sound_shards(layouts, shards)
    sent = count_sent(shards, layouts)
    assert len(sent) == processes
    assert max(sent) <= 1.001 * np.mean(sent)

    engine = place(decoder, weight_shardings(decoder, DEVICES[: expert * tensor], expert))
    needed = needed_boxes(engine, lambda device: device.id * hosts // (expert * tensor))
    transfers = route(shards, needed, dict.fromkeys(layouts, 2))
    assert set(require_exact_transfers(layouts, needed, transfers).values()) == {1.0}
    received = collections.Counter()
    for transfer in transfers:
        received[transfer.receiver] += transfer.nbytes
    elements = {path: math.prod(layout.shape) for path, layout in layouts.items()}
    share = sum(size / (hosts if re.search(cut, path) else 1) for path, size in elements.items())
    assert received == dict.fromkeys(range(hosts), 2 * share)


# Layouts, cuts, names and positions.


def test_a_layout_has_the_boxes_that_devices_hold():
    """jax puts the elements of a leaf on 8 devices of 4 processes; each device holds the elements of its box."""
    mesh = Mesh(np.reshape(jax.devices()[:8], (2, 2, 1, 2)), AXES)
    values = np.arange(24 * 6).reshape(24, 6)
    leaf = jax.device_put(values, NamedSharding(mesh, PartitionSpec(('fsdp', 'tensor'))))
    process_of = lambda device: jax.devices().index(device) // 2
    layout = layouts_of({'up': leaf}, process_of)['up']
    assert layout.shape == (24, 6)
    assert layout.itemsize == leaf.dtype.itemsize
    held = collections.defaultdict(set)
    for shard in leaf.addressable_shards:
        (box,) = (box for box in layout.holders if np.array_equal(values[Shard('up', box, (24, 6)).slices], shard.data))
        held[box].add(process_of(shard.device))
    # rows in quarters; data repeats them: processes 0 and 2 have the first half, 1 and 3 the second
    assert layout.holders == {box: tuple(sorted(found)) for box, found in held.items()}
    assert [*layout.holders.values()] == [(0, 2), (0, 2), (1, 3), (1, 3)]


def test_shards_have_at_most_2_gib():
    """5 x 1.5 GiB are 7.5 GiB: four parts of them would have 3 GiB. A row of 5 GiB is cut along its own axis."""
    whole = lambda shape: LeafLayout(shape, 2, {tuple((0, size) for size in shape): (0,)})
    layouts = {'rows': whole((5, 3 << 28)), 'row': whole((1, 2, 5 << 28)), 'some': whole((6, 1 << 29))}
    shards = divide_leaves(layouts)
    require_sound_shards(layouts, shards)
    sizes = collections.Counter((shard.path, shard.size * 2 / 2**30) for shard in shards[0])
    assert sizes['rows', 1.5] == 5
    assert sizes['some', 2.0] == 3
    assert (
        sum(count for (path, _), count in sizes.items() if path == 'row') == 4
    )  # two rows of 2.5 GiB in two parts each


def test_a_small_leaf_that_all_hold_goes_to_the_process_with_the_fewest_bytes():
    """Process 0 alone has 8 MB; of 4 + 4 MB that both have process 1 gets all, and then the norm goes to either."""
    both = lambda size: LeafLayout((size,), 4, {((0, size),): (0, 1)})
    layouts = {'own': LeafLayout((2 << 20,), 4, {((0, 2 << 20),): (0,)}), 'a': both(1 << 20), 'b': both(1 << 20)}
    shards = divide_leaves({**layouts, 'norm': both(100)})
    assert count_sent(shards, {**layouts, 'norm': both(100)}) == [(8 << 20) + 400, 8 << 20]


@pytest.mark.parametrize('seed', range(40))
def test_positions_are_those_of_numpy(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(size) for size in rng.integers(1, 7, rng.integers(0, 5)))
    box = tuple(
        tuple(sorted(map(int, rng.choice(size + 1, 2, replace=False)))) if rng.random() < 0.6 else (0, size)
        for size in shape
    )
    shard = Shard('leaf', box, shape)
    found = find_runs(box, shape).positions(np.arange(shard.size))
    whole = np.arange(math.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(found, whole[shard.slices].ravel())
    some = np.flatnonzero(rng.random(shard.size) < 0.5)
    np.testing.assert_array_equal(find_runs(box, shape).positions(some), found[some])
    assert shard.size == count_elements(box) == len(found)


@pytest.mark.parametrize(
    ('name', 'shape'),
    [
        ('up[0:2,0:3|4,3]', (2, 4)),  # of other values
        ('up[0:4,0:3|4,3]', (4, 3)),  # the whole leaf has no box
        ('up[3:5|4]', (2,)),  # past the end
        ('up[2:2|4]', (2,)),
        ('up[0:2|4', (2,)),
        ('up[0:2]', (2,)),
        ('up[0:2,0:3|4]', (2, 3)),
        ('up[0:|4]', (2,)),
        ('up[00:2|4]', (2,)),
    ],
)
def test_a_name_of_no_shard_is_refused(name, shape):
    with pytest.raises(ValueError):
        parse_shard(name, shape)
