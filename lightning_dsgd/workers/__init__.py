"""The pure halves of every algorithm, and the messages between them.

`policy` is the coordinator's half, `machine` one worker's. Time is an argument. No torch, no I/O,
no clock, no thread, no randomness but a seeded one may enter, and nothing of the other rooms.
"""
