"""What carries the decisions out: communication threads, and the buffers they share with training.

Rounds, pipeline and gossip; gradients and points as flat memory. Nothing of Lightning enters.
"""
