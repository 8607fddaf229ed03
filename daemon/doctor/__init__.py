"""The doctor: what keeps this machine from being deterministic, and the command that mends it.

tree.py reads files below a system root; kernel.py, power.py, memory.py, rights.py and gpu.py are checks, pure functions
of such a tree and of what taktd is asked to do there; examination.py is the list of them. wakeup.py measures,
preconditions.py compares two states of the machine while the daemon runs. Called by `taktctl doctor` and by the
supervisor; knows nothing of jobs, lanes or engines.
"""
