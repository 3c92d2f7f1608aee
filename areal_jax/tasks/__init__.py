"""Tasks: streams of prompts, and the verification of answers."""
