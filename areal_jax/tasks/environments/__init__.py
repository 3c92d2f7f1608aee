"""Tasks that are environments: problems, tools and reward of another framework, in an interpreter of its own."""
