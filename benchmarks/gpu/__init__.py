"""The checks of ``make gpu-check``, each in a module by its name, and what runs them one by one."""
