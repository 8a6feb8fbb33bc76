"""The command line: one tree of commands, quick to start; what a command does is imported when it is run."""
