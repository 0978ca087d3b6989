"""The ``offload`` command. Each of its commands has a module of its name."""
