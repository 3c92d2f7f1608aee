"""Programs of episodes: processes that run a command or a function of the user, and an end that leaves nothing behind.

program_host.py is what a run uses. Its processes are fork_server.py, for commands, and function_worker.py, for a
function; program_supervisor.py is between each of them and the code of the user.
"""
