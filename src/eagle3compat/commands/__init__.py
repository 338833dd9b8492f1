"""The subcommands of ``eagle3compat``, one module each."""
