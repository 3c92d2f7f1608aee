"""Programs that talk to the policy: which tokens their calls continue, and which calls a resumed episode replays.

dialogue.py keeps the rows of an episode and answers calls. agent_workflow.py runs a function of the user, or follows a
program that programs/ runs and that talks HTTP to gateway/; both get the tools of agent.tools. python_tool.py is the
tool that runs code of the model; mcp_tools.py has the tools of MCP servers, and needs the package mcp.
"""
