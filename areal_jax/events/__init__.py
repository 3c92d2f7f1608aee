"""Defines the events of a run: their kinds and fields."""
