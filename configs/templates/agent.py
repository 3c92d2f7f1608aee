"""A template: an agent. The policy answers, a tool is asked, and the policy answers once more.

    --config.rollout.workflow=package:configs/templates/agent.py:agent

docs/agents.md says what `chat` and `call_tool` do. The function starts again in a resumed run: what it asks again is
answered from the record, so it must do the same for the same replies.
"""


async def look_up():
    """Stands for a tool: a search, a calculator, a call over the network. Its text is what the policy reads."""
    return '='


async def agent(chat, call_tool, problem):
    history = [{'role': 'user', 'content': problem['question']}]
    first = await chat(history)
    if first.finish_reason == 'length':
        return  # a budget has cut it
    mark = await call_tool('look_up', {'word': first.text}, look_up)
    await chat([*history, first.message, {'role': 'user', 'content': mark}])


def score(problem, answer_text, finish_reason, episode):
    """For --config.task.reward: the share of right letters in the second of two turns."""
    last, wanted = episode['messages'][-1]['content'] or '', problem['answer']
    return (episode['turns'] == 2) * sum(a == b for a, b in zip(last, wanted, strict=False)) / len(wanted)
