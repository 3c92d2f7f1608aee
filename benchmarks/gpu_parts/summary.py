"""The numbers of a session on the terminal: a line for each part, then the table. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu_parts.parts import LEFT_OUT, RAN, Result

_ERROR_CHARACTERS = 300
_WIDTH = 15  # of a part's name


def part_line(name: str, result: Result) -> str:
    """'train_3b: failed after 61.2 s: the end of its error'."""
    if result['status'] == LEFT_OUT:
        return f'{name}: left out: {result["reason"]}'
    line = f'{name}: {result["status"]} after {result["seconds"]} s'
    if result['status'] == RAN:
        return line
    return f'{line}: {" ".join(result["error"].split())[-_ERROR_CHARACTERS:]}'


def table(results: Mapping[str, Result]) -> str:
    """What the parts measured, a line each; parts that did not run are named with their status."""
    lines = ['']
    for name, result in results.items():
        numbers = result.get('numbers') or {}
        for row in _ROWS.get(name.partition('_')[0], _no_rows)(numbers):
            lines.append(f'{name:{_WIDTH}} {row}')
        if result['status'] != RAN:
            lines.append(f'{name:{_WIDTH}} {result["status"]}')
    if found := compare_schedules(results):
        lines.append(f'{"asynchronous":{_WIDTH}} {found["ratio"]:.3f} times the tokens a second of synchronous')
    return '\n'.join(lines)


def compare_schedules(results: Mapping[str, Result]) -> dict[str, float] | None:
    """Tokens a second of both schedules and asynchronous over synchronous; None until both are measured."""
    found = {}
    for name in ('sync', 'async'):
        numbers = results.get(f'schedules_{name}', {}).get('numbers') or {}
        if 'rate' not in numbers:
            return None
        found[name] = numbers['rate']['tokens_per_second']
    return {**found, 'ratio': found['async'] / found['sync']}


def _facts(n: Mapping[str, Any]) -> Iterator[str]:
    if device := n.get('device'):
        memory = (device['memory'] or {}).get('limit_bytes')
        yield f'{device["kind"]}, {_amount(memory, 1e9, "GB for jax")}, jax {n.get("versions", {}).get("jax")}'
    if 'flops_per_second' in (product := n.get('matrix_product', {})):
        copy = n.get('copy', {}).get('bytes_per_second')
        products = _amount(product['flops_per_second'], 1e12, 'TFLOP/s')
        yield f'bfloat16 matrix product {products}, copy {_amount(copy, 1e9, "GB/s")}'


def _backends(n: Mapping[str, Any]) -> Iterator[str]:
    for name, found in n.items():
        if isinstance(found, Mapping) and 'reason' in found:
            yield f'{name}: refused: {found["reason"]}'
        elif isinstance(found, Mapping) and 'error' in found:
            yield f'{name}: FAILED: {found["error"]}'
        elif isinstance(found, Mapping) and 'status' in found:
            errors = ', '.join(f'{key} {value:.2g}' for key, value in found.items() if isinstance(value, float))
            yield f'{name}: ran, {errors}'


def _tests(n: Mapping[str, Any]) -> Iterator[str]:
    if 'passed' in n:
        yield f'{n["passed"]} passed, {len(n["failed"])} failed, {len(n["skipped"])} skipped'
        yield from (f'FAILED {test["name"]}: {test["message"].splitlines()[0]}' for test in n['failed'])


def _train(n: Mapping[str, Any]) -> Iterator[str]:
    if 'rates' not in n:
        return
    case, rates, pieces = n['case'], n['rates'], n['pieces']
    peak = (n.get('device_memory') or {}).get('peak_bytes')
    yield (
        f'{case["parameters"] / 1e9:.2f}B, {case["optimizer"]}, remat={case["remat"]}, {case["attention"]}: '
        f'{rates["tokens_per_second"]:,.0f} tokens/s, MFU {_share(rates["mfu"])} (passes alone '
        f'{_share(rates["forward_backward_mfu"])}), compiled in {n["compile"]["seconds"]:.0f} s, peak '
        f'{_amount(peak, 1e9, "GB")}'
    )
    times = ', '.join(f'{name} {1e3 * piece["median_s"]:.1f}' for name, piece in pieces.items())
    shares = ', '.join(f'{name} {_share(share)}' for name, share in n.get('shares', {}).items())
    yield f'ms: update {1e3 * n["update"]["median_s"]:.1f}, {times}'
    yield f'of the passes: {shares}'


def _decode(n: Mapping[str, Any]) -> Iterator[str]:
    if 'decode' not in n:
        return
    case, rates = n['case'], n['decode']
    yield (
        f'{case["slots"]} slots, context {case["context_tokens"]}, {case["attention"]}: '
        f'{rates["tokens_per_second"]:,.0f} tokens/s, {rates["step_ms"]:.2f} ms a step, '
        f'{_share(rates["share_of_bandwidth_bound"])} of the bandwidth bound, reads at '
        f'{_share(rates["share_of_bandwidth_read"])} of the bandwidth, compiled in {n["compile_s"]:.0f} s'
    )
    if 'pause_s' in (swap := n.get('swap', {})):
        yield (
            f'swap: staged in {_amount(swap["stage_s"], 1e-3, "ms")} beside decoding; pause '
            f'{_amount(swap["pause_s"], 1e-3, "ms")}, of it {swap["rebuilt_tokens"]:,} tokens rebuilt in '
            f'{_amount(swap["rebuild_s"], 1e-3, "ms")}'
        )


def _compile(n: Mapping[str, Any]) -> Iterator[str]:
    if found := n.get('compile'):
        yield (
            f'{found["programs"]} programs in {_amount(found["seconds"], 1, "s")}, their own seconds summed '
            f'{_amount(found["summed_s"], 1, "s")}'
        )


def _run(n: Mapping[str, Any]) -> Iterator[str]:
    if 'limit' not in n:
        return
    report, limit = n['report'], n['limit']
    busy, pause = report['busy'], report['publish_pause_seconds']
    achieved, ideal = (_amount(limit[name], 1, 's') for name in ('achieved_s', 'ideal_s'))
    yield (
        f'{n["case"]["parameters"] / 1e9:.2f}B, {report["steps"]} updates: achieved {achieved} an update, ideal '
        f'{ideal} ({_share(limit["share_of_ideal"])})'
    )
    yield (
        f'busy: rollout {_share(busy["rollout"])}, learner {_share(busy["learner"])}; pause '
        f'{_amount(pause["median"], 1e-3, "ms")}; token age mean {_amount(report["token_age"]["mean"], 1, "versions")}'
    )


def _schedules(n: Mapping[str, Any]) -> Iterator[str]:
    if rate := n.get('rate'):
        yield (
            f'{n["case"]["parameters"] / 1e9:.2f}B, eta {n["case"]["config"]["staleness"]["eta"]:g}: '
            f'{rate["tokens_per_second"]:,.0f} answer tokens trained a second over {rate["seconds"]:.1f} s'
        )


def _flags(n: Mapping[str, Any]) -> Iterator[str]:
    if update := n.get('update'):
        yield f'an update takes {_amount(update["median_s"], 1e-3, "ms")}'


def _rebuild(n: Mapping[str, Any]) -> Iterator[str]:
    for size, timing in n.items():
        if size.isdecimal():
            yield f'by prefills of {size} tokens: {_amount(timing["median_s"], 1, "s")}'


def _experts(n: Mapping[str, Any]) -> Iterator[str]:
    for name in ('layer', 'update'):
        if 'median_s' in (found := n.get(name, {})):
            yield f'{name}: {_amount(found["median_s"], 1e-3, "ms")}, MFU {_share(found["mfu"])}'


def _peer(n: Mapping[str, Any]) -> Iterator[str]:
    if 'left_out' in n:
        yield n['left_out']
    for name, found in n.items():
        if 'flops_per_second' in found:
            yield f'torch, {name}: {_amount(found["flops_per_second"], 1e12, "TFLOP/s")}'
        elif 'bytes_per_second' in found:
            yield f'torch, {name}: {_amount(found["bytes_per_second"], 1e9, "GB/s")}'


def _no_rows(n: Mapping[str, Any]) -> Iterator[str]:
    yield from ()


_ROWS = {
    'facts': _facts, 'backends': _backends, 'tests': _tests, 'train': _train, 'decode': _decode, 'compile': _compile,
    'run': _run, 'schedules': _schedules, 'flags': _flags, 'rebuild': _rebuild, 'experts': _experts, 'peer': _peer,
}  # fmt: skip


def _share(value: float | None) -> str:
    return 'unknown' if value is None else f'{value:.1%}'


def _amount(value: float | None, unit: float, name: str) -> str:
    return f'unknown {name}' if value is None else f'{value / unit:.4g} {name}'
