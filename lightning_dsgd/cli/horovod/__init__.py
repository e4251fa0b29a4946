"""What `install-horovod` does, one module per step, in the order of the command.

`probe` looks at what is there, `flags` reads the user's settings, `cache` has the wheels built
before, `preflight` finds what a build would lack, `build` builds, with `progress` on the screen and
`failure` in words, and `install` installs. Standard library only: all this runs where little else
works.
"""
