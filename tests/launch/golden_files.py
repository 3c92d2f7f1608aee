"""Files that the executors must render again, letter by letter, in golden/.

`python -m pytest tests/launch/test_slurm.py` with the environment variable WRITE_GOLDEN=1 writes them.
"""

import os
import pathlib

GOLDEN = pathlib.Path(__file__).parent / 'golden'


def require_golden(name, text, root=None):
    """`root` is the folder of this copy of the project, which the file calls /repository."""
    if root is not None:
        text = text.replace(str(root), '/repository')
    path = GOLDEN / name
    if os.environ.get('WRITE_GOLDEN'):
        path.write_text(text)
    assert text == path.read_text()
