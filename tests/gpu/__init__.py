"""What only a GPU shows. `pytest -m gpu tests/gpu` runs it; without a GPU every test is skipped.

With AREAL_JAX_GPU_TESTS=anywhere the tests run on the default device, whatever it is, so that a CPU finds their typos.
"""
