"""A package, since a third party installs a package named `tests` that would be found instead."""
