"""Programs of episodes: processes that run a command or a function of the user, and leave no process behind.

A run uses program_host.py. The host's processes are fork_server.py, for commands, and function_worker.py, for a
function; program_supervisor.py is between each of them and the code of the user.
"""
