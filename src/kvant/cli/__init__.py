"""The `kvant` command: one module per subcommand."""
