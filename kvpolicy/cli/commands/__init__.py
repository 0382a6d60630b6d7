"""The subcommands of `kvpolicy`, one per file."""
