"""The control plane: rank 0's coordinator, every rank's link to it, the alarm, tally and trace.

Messages of a few bytes; no tensor, nothing of Lightning and no collective enters.
"""
