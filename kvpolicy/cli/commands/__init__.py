"""The subcommands of `kvpolicy`, one a file."""
