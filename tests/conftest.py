"""Before jax is imported: eight virtual CPU devices, compiled programs kept on disk, quick tests compiled quickly."""

import os
import pathlib

_DEVICES = '--xla_force_host_platform_device_count=8'
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}'.strip()
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(pathlib.Path(__file__).parents[1] / '.jax_cache'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.05')  # else tests compile the same again


def pytest_configure(config):
    """The quick tests alone run each program a few times: not worth LLVM's passes. All others compile as a run does."""
    if config.option.markexpr == 'not slow' and 'xla_backend_optimization_level' not in os.environ['XLA_FLAGS']:
        os.environ['XLA_FLAGS'] += ' --xla_backend_optimization_level=0'
    # a GPU adds up in any order otherwise; and kernels that are not searched for compile sooner
    if config.option.markexpr == 'gpu' and 'xla_gpu_deterministic_ops' not in os.environ['XLA_FLAGS']:
        os.environ['XLA_FLAGS'] += ' --xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false'
