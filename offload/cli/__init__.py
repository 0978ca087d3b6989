"""The ``offload`` command. Each of its commands has a module of its name."""

from offload.versions import end_on_wrong_python

end_on_wrong_python()  # before modules that such a Python cannot read
