"""The command `kvant`: one file a subcommand."""
