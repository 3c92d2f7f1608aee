"""Programs of a run compiled for devices that are not there, and what the compiled programs show.

topology.py describes the devices, programs.py lists the programs that the run would run there, hlo.py reads a compiled
program, findings.py judges it.
"""
