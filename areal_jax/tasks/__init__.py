"""Tasks: streams of prompts, and the verification of answers. Used by app/, which hands both to the controller."""
