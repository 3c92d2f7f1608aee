"""What a text comes to and whether it equals the gold answer: one module a kind of `task.answer`."""
