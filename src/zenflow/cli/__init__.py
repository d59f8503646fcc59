"""The ``zenflow`` command. Each subcommand is a package or module here; see ``main.py``."""
