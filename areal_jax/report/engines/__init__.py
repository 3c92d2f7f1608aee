"""The report's part on single engines and classes of engines: when each was present, what each class added."""
