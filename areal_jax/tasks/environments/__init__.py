"""Tasks that are environments: problems, tools and reward of another framework, in a separate interpreter."""
