"""pydantic-ai with a tool and a text at the end."""

import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel

agent = pydantic_ai.Agent(OpenAIChatModel('any'), system_prompt='Add.')


@agent.tool_plain
def add(a: int, b: int) -> int:
    """A sum."""
    return a + b


print(agent.run_sync('What is 1 + 2?').output)
