"""pydantic-ai with a tool and an object at the end, which is the call of a tool that must be called."""

import pydantic
import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel


class Sum(pydantic.BaseModel):
    """A sum."""

    value: int


agent = pydantic_ai.Agent(OpenAIChatModel('any'), output_type=Sum)


@agent.tool_plain
def add(a: int, b: int) -> int:
    """A sum."""
    return a + b


print(agent.run_sync('What is 1 + 2?').output.value)
