"""Measurements that an update reports besides its loss."""
