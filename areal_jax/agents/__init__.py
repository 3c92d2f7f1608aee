"""Programs that talk to the policy: which tokens their calls continue, and what a resumed episode answers itself.

dialogue.py keeps the rows of an episode and answers calls. agent_workflow.py runs a function of the user, or follows a
program that talks HTTP to gateway/ and that programs/ runs; it gives both the tools of agent.tools, of which
python_tool.py runs code that the model wrote. mcp_tools.py has the tools of MCP servers, and needs the package mcp.
"""
