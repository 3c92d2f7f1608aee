"""openai-agents with its chat model, whose tool must be called first; then the same streamed."""

import asyncio

import agents
import openai


@agents.function_tool
def add(a: int, b: int) -> int:
    """A sum."""
    return a + b


async def main() -> None:
    model = agents.OpenAIChatCompletionsModel('any', openai.AsyncOpenAI())
    settings = agents.ModelSettings(tool_choice='required')
    agent = agents.Agent('adder', instructions='Add.', tools=[add], model=model, model_settings=settings)
    streamed = agents.Runner.run_streamed(agent, 'What is 1 + 2?')
    async for _ in streamed.stream_events():
        pass
    result = await agents.Runner.run(agent, 'What is 1 + 2?')
    assert result.final_output == streamed.final_output
    print(result.final_output)


asyncio.run(main())
