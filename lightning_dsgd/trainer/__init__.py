"""What Lightning sees: the strategies' shells, its hooks, its loaders, launchers and refusals.

Only this room imports Lightning. It translates: hooks become inputs of the worker machine, the
machine's actions become what Lightning does next. What is decided, it does not decide.
"""
