"""Tests of areal_jax/native."""
