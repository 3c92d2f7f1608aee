"""Both ends of the loop that know what an answer means: prompts going in, rewards coming out."""
