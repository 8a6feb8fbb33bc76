"""A package: a script and a module that it imports."""
