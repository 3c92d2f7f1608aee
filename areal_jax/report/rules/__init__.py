"""The rules that every event log keeps."""
