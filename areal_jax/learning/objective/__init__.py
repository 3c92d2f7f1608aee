"""Objectives: pure functions of arrays for advantages, ratios, corrections, gates and surrogates, combined."""
