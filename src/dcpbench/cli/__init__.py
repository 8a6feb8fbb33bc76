"""The command line. Modules that do the work are imported when their command runs."""
