"""Programs that talk to the policy: which tokens their calls continue, and what a resumed episode answers itself.

dialogue.py keeps the rows of an episode, dialogue.py answers calls, agent_workflow.py runs a function of the user.
agent_workflow.py follows a program that talks HTTP to gateway/ and that programs/ runs. mcp_tools.py gives functions the
tools of MCP servers, whose processes are in mcp_tools.py: both need the package mcp. agent_workflow.py gives them
those of agent.tools, of which python_tool.py runs code that the model wrote.
"""
