"""How much memory this process may use."""

from __future__ import annotations

import pathlib

_CGROUP_ROOT, _CGROUPS = pathlib.Path('/sys/fs/cgroup'), pathlib.Path('/proc/self/cgroup')


def memory_limit_bytes() -> int:
    """Bytes that all processes of this run may use together: the machine's memory, or a cgroup limit below it."""
    import psutil

    return min([psutil.virtual_memory().total, *cgroup_limits()])


def cgroup_limits(processes: pathlib.Path = _CGROUPS, root: pathlib.Path = _CGROUP_ROOT) -> list[int]:
    """Limits of the cgroup of this process (version 1 or 2) and of its parents."""
    limits = []
    lines = processes.read_text().splitlines() if processes.exists() else []
    for line in lines:
        _, controllers, group = line.split(':', 2)
        if controllers not in ('', 'memory'):
            continue
        top, name = (root / 'memory', 'memory.limit_in_bytes') if controllers else (root, 'memory.max')
        inside = top / group.lstrip('/')
        for directory in (inside, *inside.parents):
            if directory != top and top not in directory.parents:
                break
            file = directory / name
            if file.is_file() and (text := file.read_text().strip()).isdecimal():  # 'max' is no limit
                limits.append(int(text))
    return limits
