"""Modelled clusters: chips and models, prices of work, drawn lengths, and closed forms to check runs against."""
