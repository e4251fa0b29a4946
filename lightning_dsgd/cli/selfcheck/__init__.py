"""What `lightning-dsgd selftest` has real ranks do, on the user's own devices.

`kernels` is a model whose backward takes its time on the device, `checks` is what is tried, and
`rank` the program that each rank runs.
"""
