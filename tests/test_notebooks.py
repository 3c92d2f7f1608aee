"""The notebooks of docs/ run from the first cell to the last, and are kept without outputs."""

import json
import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / 'docs').rglob('*.ipynb'))


def test_there_is_a_notebook():
    assert 'first_run.ipynb' in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text())['cells']
    assert [cell['id'] for cell in cells if cell.get('outputs') or cell.get('execution_count')] == []


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH')))))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': str(tmp_path)}})
    client.execute()  # raises at the first cell that does
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
    assert any('image/png' in output.get('data', {}) for output in outputs)
    printed = ''.join(output['text'] for output in outputs if output['output_type'] == 'stream')
    assert 'step 40/40' in printed
    assert 'model.safetensors' in printed
