"""The processes of a run: learner, engines, exporter, servers."""
